"""What a ledger must show after any faults: every sample once per epoch, no step missing, repeats
bitwise identical.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


def kept_steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that count: of each step the last one written, in the order of the steps."""
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def assert_every_sample_once(lines: list[dict[str, Any]], *, total: int) -> None:
    """The kept steps cover the positions 0 … total - 1 of the stream without gap or overlap."""
    kept = kept_steps(lines)
    assert [line["step"] for line in kept] == list(range(1, len(kept) + 1)), "a step is missing"
    position = 0
    for line in kept:
        assert line["first"] == position, (
            f"step {line['step']} begins at {line['first']}, not at {position}"
        )
        position = line["last"] + 1
    assert position == total, f"{position} samples were used, not {total}"


def assert_repeats_are_equal(lines: list[dict[str, Any]]) -> int:
    """Steps done again at the same world size have the loss of the first time, bitwise. Returns
    how many were repeated.
    """
    losses: dict[tuple[int, int], set[str]] = {}
    for line in lines:
        if line["loss"] is not None:  # a rank has died with its part of it
            losses.setdefault((line["step"], line["world_size"]), set()).add(line["loss"])
    assert not {key: sorted(seen) for key, seen in losses.items() if len(seen) > 1}
    return sum(count - 1 for count in Counter(line["step"] for line in lines).values())

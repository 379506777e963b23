"""Desync detection: which collectives the ranks of a group were in when it ended, and which rank
differed.

All ranks of a group must enter the same collectives in the same order. Each rank records its latest
ones in memory that outlives it. Comparing the records shows the first collective that differs, or
the rank that did not reach it, whatever error torch raised: a timeout, an abort in C++, a closed
connection or a wrong sum.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdist_trainer.liveness import Call

Note = dict[str, Any]

COMPARE_SECONDS = 2.0
"""How often the ranks of one node are compared while they work."""
MOST_CALLS = 512
"""Calls of all ranks together that agents tell each other, so that those of hundreds of ranks fit
into one document.
"""
_MOST_LINES = 32
_P2P = {"send", "recv"}
_UNEVEN = "_uneven"
"""End of the name of a collective in which each rank may rightly give another amount than its
peers.
"""


@dataclass(frozen=True)
class Mismatch:
    """The ranks that entered another collective than the majority; empty if there is
    no majority.
    """

    ranks: tuple[int, ...]
    message: str
    collective: str


class DesyncDetector:
    """Compares the collectives of one node's ranks at regular intervals."""

    def __init__(self) -> None:
        self._next = 0.0
        self._before: Mismatch | None = None

    def look(self, read: Callable[[], Sequence[Note]]) -> Mismatch | None:
        """Returns the ranks that entered another collective than their peers. Only what is found
        twice counts, since ranks write while they are read.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        before, self._before = self._before, find_odd(read())
        self._next = now + (COMPARE_SECONDS if self._before is None else 0.0)
        return self._before if self._before == before else None


def write_calls(calls: Sequence[Call], *, world_size: int) -> list[list[Any]]:
    """A rank's latest collectives, in the form of a note."""
    most = max(1, min(16, MOST_CALLS // max(1, world_size)))
    return [
        [call.group, call.sequence, call.op, call.dtype, call.numel, call.shape]
        for call in calls[-most:]
    ]


def _read(note: Note) -> Iterator[Call]:
    for number, (group, sequence, op, dtype, numel, shape) in enumerate(
        note.get("calls", ()), start=1
    ):
        if op not in _P2P and not group.startswith("?"):
            yield Call(number, sequence, op, dtype, numel, shape, group)


def find_odd(notes: Iterable[Note]) -> Mismatch | None:
    """The first collective that the ranks of a group entered differently, and by majority which
    ranks did; None if all agree.
    """
    for places in _by_group(notes).values():
        for sequence in sorted({sequence for calls in places.values() for sequence in calls}):
            here = {rank: calls[sequence] for rank, calls in places.items() if sequence in calls}
            kinds = {rank: _kind(call) for rank, call in here.items()}
            if len(set(kinds.values())) > 1:
                return _judge(here, kinds)
    return None


def _by_group(notes: Iterable[Note]) -> dict[str, dict[int, dict[int, Call]]]:
    """Group -> rank -> sequence -> call."""
    groups: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    for note in notes:
        for call in _read(note):
            groups[call.group][int(note["rank"])][call.sequence] = call
    return groups


def _kind(call: Call) -> tuple[Any, ...]:
    """The properties that must be the same on all ranks of a collective."""
    return (call.op, call.dtype) if call.op.endswith(_UNEVEN) else (call.op, call.dtype, call.numel)


def _judge(calls: Mapping[int, Call], kinds: Mapping[int, tuple[Any, ...]]) -> Mismatch:
    (common, count), *_ = Counter(kinds.values()).most_common(1)
    said: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(calls, key=lambda rank: (kinds[rank] == common, rank)):
        said[str(calls[rank])].append(rank)
    message = "the ranks entered different collectives: " + ", ".join(
        f"{format_ranks(ranks)} {call}" for call, ranks in said.items()
    )
    if count * 2 <= len(calls):
        return Mismatch((), message, next(iter(said)))
    odd = tuple(sorted(rank for rank in calls if kinds[rank] != common))
    return Mismatch(odd, message, str(calls[odd[0]]))


def find_missing(notes: Sequence[Note]) -> Mismatch | None:
    """The few ranks that did not enter a collective in which most ranks wait; None if there are
    none.
    """
    inside = {int(note["rank"]) for note in notes if note["inside"]}
    for places in _by_group(notes).values():
        last = {rank: calls[max(calls)] for rank, calls in places.items()}
        latest = max(call.sequence for call in last.values())
        behind = tuple(sorted(rank for rank, call in last.items() if call.sequence < latest))
        waiting = [
            rank for rank, call in last.items() if call.sequence == latest and rank in inside
        ]
        if behind and len(waiting) * 2 > len(last):
            call = last[behind[0]]
            message = (
                f"{format_ranks(behind)} did not come to {last[waiting[0]]}, in which "
                f"{format_ranks(waiting)} waited"
            )
            return Mismatch(behind, f"{message}; the last before that was {call}", str(call))
    return None


def format_collectives(notes: Iterable[Note]) -> tuple[str, ...]:
    """The collective that each rank was in, with equal ranks together: `ranks 0,2-7 in
    all_reduce(float32[8]) #3`.
    """
    notes = sorted(notes, key=lambda note: int(note["rank"]))
    if not any(note["inside"] or note["stopped"] or note.get("calls") for note in notes):
        return ()  # nobody noted any, as of a script
    said: dict[str, list[int]] = defaultdict(list)
    for note in notes:
        last = next((str(call) for call in reversed(list(_read(note)))), None)
        out = f"in no collective, after {last}" if last else "in no collective"
        doing = f"in {note['collective']}" if note["inside"] else out
        said[doing + (", stopped by a signal" if note["stopped"] else "")].append(int(note["rank"]))
    lines = [f"{format_ranks(ranks)} {doing}" for doing, ranks in said.items()]
    return tuple(
        lines
        if len(lines) <= _MOST_LINES
        else [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more"]
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0,2-7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"

"""What every measurement prints: medians with their spread, and the ratio to the row that they are
compared with.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TypeVar

T = TypeVar("T")


def interleave(measures: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """Take every measure once per round, so that a machine that warms up or slows down does so for
    all of them.
    """
    taken: dict[str, list[T]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            taken[name].append(measure())
    return taken


def title(text: str) -> None:
    """Open a measurement: what it is about, and on what it was taken."""
    load = os.getloadavg()[0]
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {version('torch')}"
    )
    print(f"\n{text}\n({machine}; load when it began {load:.1f})")


def table(
    rows: Mapping[str, Sequence[float]], *, unit: str, scale: float, base: str, digits: int = 1
) -> None:
    """Print the median, the 10th to 90th percentile and the ratio to `base` of every row's values
    (times `scale`).
    """
    reference = statistics.median(rows[base])
    lines = []
    for name, values in rows.items():
        middle = statistics.median(values)
        low, high = spread(values)
        numbers = [f"{number * scale:.{digits}f}" for number in (middle, low, high)]
        lines.append(
            (
                name,
                f"{numbers[0]} {unit}",
                f"{numbers[1]} … {numbers[2]}",
                f"{middle / reference:.2f}x",
            )
        )
    columns(("", "median", "p10 … p90", f"to {base}"), lines)


def columns(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print rows of text under a head, aligned: the first column to the left, the others to the
    right.
    """
    rows = [head, *lines]
    widths = [max(len(row[index]) for row in rows) for index in range(len(head))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  " + "  ".join(cells).rstrip())


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """10th and 90th percentile; of few values the least and the largest."""
    if len(values) < 10:
        return min(values), max(values)
    cuts = statistics.quantiles(values, n=10)
    return cuts[0], cuts[-1]


def seconds_with_spread(values: Sequence[float]) -> str:
    """The median and the ends of some seconds, as text."""
    return f"{statistics.median(values):.3f} s ({min(values):.3f} … {max(values):.3f})"

"""What the rows of a soak say together: whether anything grows, and whether anything slows down."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import inf, sqrt
from typing import Any

from bench.table import quantile

Row = Mapping[str, Any]
_FEW = 5  # rows at the beginning and at the end of a scenario
_FIRST_RECOVERIES = 10
_DEVIATES = 1.96  # of a normal distribution, 95 % lie within


def theil_sen(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope of points that may lie anywhere: the median of the slopes of all pairs, and its
    upper bound at 95 % (Sen 1968). Infinite bound where there are too few points for one.
    """
    pairs = combinations(points, 2)
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x1 != x2)
    if not slopes:
        return 0.0, inf
    count = len(points)
    deviation = _DEVIATES * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    upper = round((len(slopes) + deviation) / 2)
    return statistics.median(slopes), slopes[upper] if upper < len(slopes) else inf


def summarize(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Lines (what, value) about the rows of one scenario."""
    recoveries = [each for row in rows for each in row["recoveries"]]
    seconds = sum(row["seconds"] for row in rows)
    lost = sum(row["accidents"] for row in rows)
    yield "seconds, accidents, recoveries", f"{seconds:.0f}, {lost}, {len(recoveries)}"
    speeds = [row["stepsPerSecond"] for row in rows if row["stepsPerSecond"] is not None]
    if speeds:
        early, late = statistics.median(speeds[:_FEW]), statistics.median(speeds[-_FEW:])
        yield "steps/s early, late", f"{early:.1f}, {late:.1f} ({late / max(early, 0.01):.0%})"
    if recoveries:
        early, all_of_them = quantile(recoveries[:_FIRST_RECOVERIES], 0.95), recoveries
        late = quantile(all_of_them[len(all_of_them) // 2 :], 0.95)
        yield "recoveries' p95 early, late", f"{early:.2f} s, {late:.2f} s"
    yield "commits", str(rows[-1]["commits"] if rows else 0)
    for name in ("files", "bytes", "series"):
        found = [row[name] for row in rows if row[name] is not None]
        if found:
            yield f"{name} first, last, most", f"{found[0]:,}, {found[-1]:,}, {max(found):,}"
    yield from _processes(rows)
    yield from _threads(rows)


def _processes(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """What each process held, of each name the one that lived longest."""
    lives: dict[tuple[str, int], list[tuple[float, Mapping[str, int]]]] = defaultdict(list)
    now = 0.0
    for row in rows:
        now += row["seconds"]
        for name, held in row["processes"].items():
            lives[name, held["pid"]].append((now, held))
    longest: dict[str, list[tuple[float, Mapping[str, int]]]] = {}
    for (name, _), life in lives.items():
        if len(life) > len(longest.get(name, ())):
            longest[name] = life
    for name, life in sorted(longest.items()):
        middle, upper = theil_sen([(at / 60, held["privateKib"]) for at, held in life])
        levels = (
            f"{what} {life[0][1][what]}, {life[-1][1][what]}, {max(held[what] for _, held in life)}"
            for what in ("descriptors", "threads")
        )
        memory = f"{life[-1][1]['privateKib'] >> 10} MiB, {middle:+.0f} (≤ {upper:+.0f}) KiB/min"
        yield f"{name}, {len(life)} rows", "; ".join((memory, *levels))


def _threads(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The cores that threads took, by their names, early and late."""
    for name in sorted({name for row in rows for name in row["cores"]}):
        cores = [row["cores"].get(name, 0.0) for row in rows]
        early, late = statistics.median(cores[:_FEW]), statistics.median(cores[-_FEW:])
        if max(early, late) >= 0.01:
            yield f"cores of {name} early, late", f"{early:.2f}, {late:.2f}"

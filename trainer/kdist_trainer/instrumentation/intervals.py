"""Arithmetic on intervals of time."""

from __future__ import annotations

from collections.abc import Iterable


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length that at least one of the spans covers.

    Args:
        spans: start and end of each, in any order and in one unit.

    Returns:
        The covered length in that unit; overlaps count once.
    """
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered

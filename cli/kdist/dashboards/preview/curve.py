"""A curve and an event marker of a chart: where a curve has gaps, and how far the axis of its
values goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kdist.dashboards.model import Color, Panel

_RARE = 0.03
_FAR = 4.0


def bound(panel: Panel, values: Sequence[float]) -> float | None:
    """How far an axis from 0 needs to go if a few values are so far above the others that those
    could not be read; else None.
    """
    if (
        panel.minimum != 0
        or panel.maximum is not None
        or panel.logarithmic
        or len(values) < 1 / _RARE
    ):
        return None
    usual = sorted(values)[math.floor(len(values) * (1 - _RARE)) - 1]
    return usual * 1.5 if 0 < usual * _FAR < max(values) else None


def limits(panel: Panel, values: Sequence[float]) -> tuple[float, float]:
    """The axis' lower and upper end, the second always greater."""
    if panel.logarithmic:
        known = [value for value in values if value > 0]
        low = 10.0 ** math.floor(math.log10(min(known, default=1.0)))
        high = 10.0 ** math.ceil(math.log10(max(known, default=1.0)))
        return low, high if high > low else low * 10
    low = min(values, default=0.0) if panel.minimum is None else panel.minimum
    high = max(values, default=low) if panel.maximum is None else panel.maximum
    if high > low + abs(low) * 1e-9:
        return low, high + ((high - low) * 0.06 if panel.maximum is None else 0.0)
    if low > 0:
        return 0.0, low * 1.3
    return low - (0.0 if panel.minimum is not None else max(1.0, abs(low) * 0.1)), low + max(
        1.0, abs(low) * 0.1
    )


@dataclass(frozen=True)
class Curve:
    """A named line; a point that is not finite is a gap."""

    name: str
    color: Color
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1] if self.points else math.nan


@dataclass(frozen=True)
class EventMarker:
    """Something that happened at a time: drawn through the whole height if it is `loud`, as a tick
    on the axis if not.
    """

    title: str
    color: Color
    at: float
    loud: bool


def runs(points: Sequence[tuple[float, float]], gap: float) -> list[list[tuple[float, float]]]:
    """The points without gaps: cut where one is not finite or where too long nothing was known."""
    found: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if found[-1] and at - found[-1][-1][0] > gap:
            found.append([])
        if math.isfinite(value):
            found[-1].append((at, value))
        elif found[-1]:
            found.append([])
    return [run for run in found if run]

"""A curve and an event marker of a chart: where a curve has gaps, and where the axis of its values
begins and ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kdist.report.chart import Point
from kdist.report.page import Color
from tools.dashboards.model import Panel

_OUTLIERS = 0.03  # share of the values that an axis may leave out
_FAR = 4.0  # times the others' largest value


@dataclass(frozen=True)
class Curve:
    """A named line of (Unix time, value); a value that is not finite is a gap."""

    name: str
    color: Color
    points: tuple[Point, ...]

    @property
    def last(self) -> float:
        """The newest value; NaN if there is none."""
        return self.points[-1][1] if self.points else math.nan

    @property
    def finite(self) -> list[Point]:
        """The points that are not gaps."""
        return [point for point in self.points if math.isfinite(point[1])]


@dataclass(frozen=True)
class EventMarker:
    """An event at a Unix time. A `major` one is drawn over the whole height, others as a tick on
    the axis.
    """

    title: str
    color: Color
    at: float
    major: bool


def usual_limit(panel: Panel, values: Sequence[float]) -> float | None:
    """Where an axis from 0 may end if a few values are so far above the others that those could not
    be read; else None.
    """
    if (
        panel.minimum != 0
        or panel.maximum is not None
        or panel.logarithmic
        or len(values) < 1 / _OUTLIERS
    ):
        return None
    usual = sorted(values)[math.floor(len(values) * (1 - _OUTLIERS)) - 1]
    return usual * 1.5 if 0 < usual * _FAR < max(values) else None


def limits(panel: Panel, values: Sequence[float]) -> tuple[float, float]:
    """The lower and upper end of the axis, the second always greater."""
    if panel.logarithmic:
        positive = [value for value in values if value > 0]
        first = math.floor(math.log10(min(positive, default=1.0)))
        last = math.ceil(math.log10(max(positive, default=1.0)))
        return float(f"1e{first}"), float(f"1e{max(last, first + 1)}")
    low = min(values, default=0.0) if panel.minimum is None else panel.minimum
    high = max(values, default=low) if panel.maximum is None else panel.maximum
    if high > low + abs(low) * 1e-9:
        return low, high + ((high - low) * 0.06 if panel.maximum is None else 0.0)
    if low > 0:
        return 0.0, low * 1.3
    margin = max(1.0, abs(low) * 0.1)
    return low - (0.0 if panel.minimum is not None else margin), low + margin


def split_at_gaps(points: Sequence[Point], longest: float) -> list[list[Point]]:
    """The runs of points between gaps: where a value is not finite, or the next point is more than
    `longest` seconds away.
    """
    found: list[list[Point]] = [[]]
    for at, value in points:
        if found[-1] and at - found[-1][-1][0] > longest:
            found.append([])
        if math.isfinite(value):
            found[-1].append((at, value))
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def stack(curves: Sequence[Curve]) -> list[Curve]:
    """Each curve on top of those before it, at the times that any of them has; a missing value is
    zero.
    """
    times = sorted({at for curve in curves for at, _ in curve.points})
    heights = dict.fromkeys(times, 0.0)
    found = []
    for curve in curves:
        known = dict(curve.finite)
        for at in times:
            heights[at] += known.get(at, 0.0)
        found.append(Curve(curve.name, curve.color, tuple((at, heights[at]) for at in times)))
    return found

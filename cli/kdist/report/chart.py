"""Charts as SVG: round numbers for axes, scales from values to pixels, and the plot area with its
axes. Lengths are pixels of the SVG's view box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kdist.report.page import Markup, element, join

RIGHT, TOP, BOTTOM = 10, 8, 20
"""Margins of a plot; the left one depends on the texts there."""

Tick = tuple[float, str]
Point = tuple[float, float]

_SIZES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
_DAY = 86_400


def round_ticks(low: float, high: float, *, most: int = 4) -> list[float]:
    """Round numbers between `low` and `high`, at most about `most` intervals apart."""
    length = high - low
    if not 0 < length < math.inf:
        return [low]
    size = 10 ** math.floor(math.log10(length / most))
    step = next(
        (factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= length / most * 0.999),
        10 * size,
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * count for count in range(first, last + 1)]


def decade_ticks(low: float, high: float, *, most: int = 4) -> list[float]:
    """Round numbers for a logarithmic axis: 1, 2 and 5 of each decade between `low` and `high`, or
    powers of ten alone if those are more than `most` intervals.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)

    def ticks(*factors: int) -> list[float]:
        values = [float(f"{factor}e{power}") for power in powers for factor in factors]
        return [value for value in values if low <= value <= high]

    found = ticks(1, 2, 5)
    if len(found) <= most + 1:
        return found
    found = ticks(1)
    return found[:: max(1, math.ceil((len(found) - 1) / most))]


def time_ticks(start: float, end: float, *, most: int) -> list[float]:
    """Round times in seconds between two, Unix times or durations, at most `most` intervals."""
    length = end - start
    if not length < math.inf:
        return [start]
    days = _DAY * math.ceil(length / most / _DAY)
    step = next((size for size in _SIZES if length / size <= most), days)
    first, last = math.ceil(start / step), math.floor(end / step)
    return [float(step * count) for count in range(first, last + 1)]


class Scale:
    """Maps the values from `low` to `high` to pixels, by their logarithm if `logarithmic`. Values
    above `high` are placed there.
    """

    def __init__(
        self, limits: tuple[float, float], pixels: tuple[float, float], *, logarithmic: bool = False
    ) -> None:
        self.low, self.high = limits
        self.logarithmic = logarithmic
        self._start, self._end = pixels

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            low, high = math.log10(self.low), math.log10(self.high)
            share = (math.log10(max(value, self.low)) - low) / ((high - low) or 1.0)
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self._start + min(share, 1.0) * (self._end - self._start)


class Plot:
    """The area of a chart between its axes, and the parts that are drawn in it.

    Args:
        width, height: of the whole chart.
        x, y: lowest and highest value of each axis.
        left: margin for the texts of the y axis.
        logarithmic: the axes that are, of "xy".
    """

    def __init__(
        self,
        width: int,
        height: int,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        left: int = 64,
        logarithmic: str = "",
    ) -> None:
        self.width = width
        self.height = height
        self.left = left
        self.right = width - RIGHT
        self.floor = height - BOTTOM
        self.x = Scale(x, (left, self.right), logarithmic="x" in logarithmic)
        self.y = Scale(y, (self.floor, TOP), logarithmic="y" in logarithmic)

    def y_axis(self, ticks: Iterable[Tick]) -> Markup:
        """A rule across the plot for each tick, and its text at the left."""
        parts = []
        for value, text in ticks:
            y = self.y(value)
            parts.append(element("line", class_="rule", x1=self.left, x2=self.right, y1=y, y2=y))
            parts.append(tick_text(text, self.left - 8, y + 3.5, anchor="end"))
        return join(*parts)

    def x_axis(self, ticks: Iterable[Tick]) -> Markup:
        return join(*(tick_text(text, self.x(value), self.floor + 16) for value, text in ticks))

    def line(self, points: Iterable[Point], **attributes: object) -> Markup:
        return polyline([(self.x(at), self.y(value)) for at, value in points], **attributes)

    def mark(self, at: float, *content: Markup, top: int = TOP, **attributes: object) -> Markup:
        """A vertical line at a value of the x axis, from the axis up to `top`."""
        x = self.x(at)
        return element("line", *content, **attributes, x1=x, x2=x, y1=top, y2=self.floor)

    def render(self, title: str, *parts: Markup) -> Markup:
        return svg(self.width, self.height, title, *parts)


def svg(width: int, height: int, title: str, *parts: Markup) -> Markup:
    """An SVG element with a text for readers who cannot see it."""
    return element("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


def tick_text(text: str, x: float, y: float, *, anchor: str = "middle") -> Markup:
    """A text next to an axis."""
    return element("text", text, class_="tick", text_anchor=anchor, x=x, y=y)


def polyline(points: Sequence[Point], **attributes: object) -> Markup:
    """A line through these points, in pixels."""
    return element(
        "polyline",
        **{"class_": "line", **attributes},
        points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
    )

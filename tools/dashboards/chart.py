"""A panel's chart as SVG: lines, stacked areas, event markers and sparklines. Lengths are
pixels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from kdist.report.chart import TOP, Plot, Tick, tick_text, time_ticks
from kdist.report.page import Markup, element, paint
from tools.dashboards.curve import (
    Curve,
    EventMarker,
    limits,
    split_at_gaps,
    stack,
    usual_limit,
)
from tools.dashboards.model import Panel
from tools.dashboards.prometheus import Window
from tools.dashboards.values import format_value, linear_axis, logarithmic_axis

_LEFT = 58
_TALL = 140  # a chart that has room for more texts at its y axis
_CHARACTER = 6.3  # width of a character of an axis' text, at most
_MOST_NAMED = 4  # event markers with their names next to them
_NAMED_WIDTH = 600  # of a chart that has room for such names


class PanelPlot:
    """The plot of a panel: its axes, chosen by the values it shows, and the parts drawn in it.

    `peak` is the largest value if the axis does not reach it, else None.
    """

    def __init__(
        self, panel: Panel, values: Sequence[float], window: Window, width: int, height: int
    ) -> None:
        finite = [value for value in values if math.isfinite(value)]
        usual = usual_limit(panel, finite)
        self.peak = max(finite) if usual is not None else None
        shown = [*(value for value in finite if value <= usual), usual] if usual else finite
        self.low, high = limits(panel, shown)
        if panel.logarithmic:
            self.ticks = logarithmic_axis(self.low, high, panel.unit)
        else:
            most = 4 if height > _TALL else 3
            self.ticks = linear_axis(self.low, high, panel.unit, most=most)
        longest = max((len(text) for _, text in self.ticks), default=0)
        self.panel = panel
        self.window = window
        self.plot = Plot(
            width,
            height,
            x=(window.start, window.end),
            y=(self.low, high),
            left=max(_LEFT, math.ceil(12 + _CHARACTER * longest)),
            logarithmic="y" if panel.logarithmic else "",
        )

    def axes(self) -> Iterator[Markup]:
        """Both axes with their texts."""
        yield self.plot.y_axis(self.ticks)
        yield self.plot.x_axis(self._times())

    def _times(self) -> Iterator[Tick]:
        start, end = self.window.start, self.window.end
        clock = "%H:%M:%S" if end - start < 1200 else "%H:%M"
        for at in time_ticks(start, end, most=max(2, self.plot.width // 75)):
            if self.plot.left + 14 < self.plot.x(at) < self.plot.right - 14:
                yield at, time.strftime(clock, time.localtime(at))

    def peak_text(self, peak: float, curves: Sequence[Curve]) -> Markup:
        """How far a curve goes above the axis, next to where it leaves the plot."""
        at = next(at for curve in curves for at, value in curve.points if value == peak)
        text = f"up to {format_value(peak, self.panel.unit)}"
        x, anchor = self._next_to(at, turn=0.5)
        return tick_text(text, x, TOP + 8, anchor=anchor)

    def event(self, event: EventMarker) -> Markup:
        """An event marker, with its name as tooltip."""
        return self.plot.mark(
            event.at,
            element("title", event.title),
            top=TOP if event.major else self.plot.floor - 6,
            class_=f"event {'major' if event.major else 'minor'}",
            style=f"stroke:{paint(event.color)}",
        )

    def event_name(self, event: EventMarker) -> Markup:
        """The name of an event, next to its marker."""
        x, anchor = self._next_to(event.at, turn=0.8)
        return element(
            "text",
            event.title,
            class_="name over",
            style=f"fill:{paint(event.color)}",
            text_anchor=anchor,
            x=x,
            y=TOP + 8,
        )

    def _next_to(self, at: float, *, turn: float) -> tuple[float, str]:
        """Position and anchor of a text right of a time; left of it beyond a share of the width."""
        x = self.plot.x(at)
        return (x - 6, "end") if x > self.plot.width * turn else (x + 6, "start")

    def line(self, curve: Curve) -> Iterator[Markup]:
        """The curve, with a dot at each value if it has only few or one alone."""
        spans_gaps = self.panel.spans_gaps
        longest = math.inf if spans_gaps else 3 * self.window.step
        for run in split_at_gaps(curve.points, longest):
            points = _changes(run) if spans_gaps else run
            yield self.plot.line(points, style=f"stroke:{paint(curve.color)}")
            if spans_gaps or len(points) == 1:
                for at, value in points:
                    yield element(
                        "circle",
                        r=2.4,
                        cx=self.plot.x(at),
                        cy=self.plot.y(value),
                        style=f"fill:{paint(curve.color)}",
                    )

    def area(self, curve: Curve, below: Curve | None = None, *, kind: str) -> Iterator[Markup]:
        """The area between a curve and the one below it, or the axis."""
        bottom = dict(below.points) if below else {}
        x, y = self.plot.x, self.plot.y
        for run in split_at_gaps(curve.points, 3 * self.window.step):
            top = [f"{x(at):.1f},{y(value):.1f}" for at, value in run]
            back = [f"{x(at):.1f},{y(bottom.get(at, self.low)):.1f}" for at, _ in reversed(run)]
            yield element(
                "path",
                element("title", curve.name),
                class_=kind,
                style=f"fill:{paint(curve.color)}",
                d=f"M{' L'.join([*top, *back])} Z",
            )


def render_chart(
    panel: Panel,
    curves: Sequence[Curve],
    events: Sequence[EventMarker],
    window: Window,
    *,
    width: int,
    height: int,
) -> Markup:
    """The chart as an SVG element."""
    shown = stack(curves) if panel.stacked else list(curves)
    highest = shown[-1:] if panel.stacked else shown
    values = [value for curve in highest for _, value in curve.points]
    plot = PanelPlot(panel, values, window, width, height)
    markers = [plot.event(event) for event in events]
    parts = list(plot.axes())
    if panel.stacked:
        for below, curve in zip([None, *shown], shown, strict=False):
            parts += plot.area(curve, below, kind="layer")
        parts += markers
    else:
        parts += markers
        if len(curves) == 1:
            parts += plot.area(curves[0], kind="faint")
        for curve in curves:
            parts += plot.line(curve)
    major = [event for event in events if event.major]
    if width > _NAMED_WIDTH and len(major) <= _MOST_NAMED:
        parts += [plot.event_name(event) for event in major]
    if plot.peak is not None:
        parts.append(plot.peak_text(plot.peak, shown))
    return plot.plot.render(f"{panel.title}: {panel.description}", *parts)


def render_sparkline(curve: Curve, window: Window, *, width: int, height: int) -> Markup:
    """A small curve without axes; nothing for one that does not change."""
    points = curve.finite
    values = [value for _, value in points]
    if len(values) < 3 or max(values) == min(values):
        return Markup()
    low, high = min(values), max(values)
    length = window.end - window.start
    path = [
        (
            (at - window.start) / length * width,
            height - 2 - (value - low) / (high - low) * (height - 6),
        )
        for at, value in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
    return element(
        "svg",
        element(
            "path",
            class_="faint",
            style=f"fill:{paint(curve.color)}",
            d=f"M{path[0][0]:.1f},{height} L{line} L{path[-1][0]:.1f},{height} Z",
        ),
        element("polyline", style=f"stroke:{paint(curve.color)}", points=line),
        class_="spark",
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _changes(run: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points whose value differs from the one before."""
    before = [math.nan, *(value for _, value in run)]
    return [point for point, value in zip(run, before, strict=False) if point[1] != value]

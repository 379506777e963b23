"""One panel's curves as SVG: axes that stay in the background, lines that do not, and what happened as marks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kdist.dashboards.colors import Color
from kdist.dashboards.panels import Panel
from kdist.dashboards.preview import figures
from kdist.dashboards.preview.frame import BOTTOM, RIGHT, TOP, Frame
from kdist.dashboards.prometheus import Window

_MOST_NAMED = 4


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
class Event:
    """Something that happened at a time: drawn through the whole height if it is `loud`, as a tick on the axis if not."""

    title: str
    color: Color
    at: float
    loud: bool


def paint(color: Color) -> str:
    """A colour for light and dark grounds, as CSS."""
    return f"light-dark({color[0]},{color[1]})"


def draw(panel: Panel, curves: Sequence[Curve], events: Sequence[Event], window: Window, *, width: int, height: int) -> str:
    """The picture as an SVG element."""
    shown = pile(curves) if panel.stacked else list(curves)
    values = [value for curve in (shown[-1:] if panel.stacked else shown) for _, value in curve.points]
    frame = Frame(panel, values, window, width, height)
    loud = [event for event in events if event.loud]
    named = loud if width > 600 and len(loud) <= _MOST_NAMED else []
    marks = [_event(frame, event) for event in events]
    parts = [_axes(frame), *([] if panel.stacked else marks)]
    if panel.stacked:
        floor: Curve | None = None
        for curve in shown:
            parts.append(_area(frame, curve, floor))
            floor = curve
        parts += marks
    else:
        if len(curves) == 1:
            parts.append(_area(frame, curves[0], None, faint=True))
        parts += [_line(frame, curve, bridged=panel.bridged) for curve in curves]
    parts += [_name(frame, event) for event in named]
    if frame.peak is not None:
        parts.append(_peak(frame, frame.peak, panel, shown))
    label = escape(f"{panel.title}: {panel.description}")
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def spark(curve: Curve, window: Window, *, width: int, height: int) -> str:
    """A small curve without axes."""
    values = [value for _, value in curve.points if math.isfinite(value)]
    if len(values) < 3 or max(values) == min(values):
        return ""
    low, high = min(values), max(values)
    span = window.end - window.start

    def place(point: tuple[float, float]) -> str:
        x = (point[0] - window.start) / span * width
        return f"{x:.1f},{height - 2 - (point[1] - low) / (high - low) * (height - 6):.1f}"

    finite = [point for point in curve.points if math.isfinite(point[1])]
    path = " ".join(place(point) for point in finite)
    first, last = place(finite[0]).split(",")[0], place(finite[-1]).split(",")[0]
    area = f'<path class="faint" style="fill:{paint(curve.color)}" d="M{first},{height} L{path} L{last},{height} Z"/>'
    line = f'<polyline style="stroke:{paint(curve.color)}" points="{path}"/>'
    return f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" aria-hidden="true">{area}{line}</svg>'


def pile(curves: Sequence[Curve]) -> list[Curve]:
    """Curves on top of each other, at the times that any of them has; a missing point is zero."""
    times = sorted({at for curve in curves for at, _ in curve.points})
    heights = dict.fromkeys(times, 0.0)
    found = []
    for curve in curves:
        known = dict(curve.points)
        for at in times:
            value = known.get(at, 0.0)
            heights[at] += value if math.isfinite(value) else 0.0
        found.append(Curve(curve.name, curve.color, tuple((at, heights[at]) for at in times)))
    return found


def _axes(frame: Frame) -> str:
    parts = []
    for value, text in frame.ticks:
        y = frame.y(value)
        parts.append(f'<line class="rule" x1="{frame.left}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{frame.left - 8}" y="{y + 3.5:.1f}">{escape(text)}</text>')
    window = frame.window
    for at in figures.time_ticks(window.start, window.end, most=max(2, frame.width // 75)):
        clock = time.strftime("%H:%M:%S" if window.end - window.start < 1200 else "%H:%M", time.localtime(at))
        x = frame.x(at)
        if frame.left + 14 < x < frame.width - RIGHT - 14:
            parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{frame.height - 4}">{clock}</text>')
    return "".join(parts)


def _peak(frame: Frame, peak: float, panel: Panel, curves: Sequence[Curve]) -> str:
    """Where a curve leaves the picture, and how far it goes."""
    at = next(at for curve in curves for at, value in curve.points if value == peak)
    x = frame.x(at)
    side, x = ("end", x - 6) if x > frame.width / 2 else ("start", x + 6)
    return (
        f'<text class="tick" text-anchor="{side}" x="{x:.1f}" y="{TOP + 8}">up to {escape(figures.show(peak, panel.unit))}</text>'
    )


def _event(frame: Frame, event: Event) -> str:
    x, floor = frame.x(event.at), frame.height - BOTTOM
    style = f"stroke:{paint(event.color)}"
    top = TOP if event.loud else floor - 6
    kind = "loud" if event.loud else "quiet"
    return (
        f'<line class="event {kind}" style="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{floor}">'
        f"<title>{escape(event.title)}</title></line>"
    )


def _name(frame: Frame, event: Event) -> str:
    x = frame.x(event.at)
    side, place = ("end", x - 6) if x > frame.width * 0.8 else ("start", x + 6)
    text = f'<text class="name over" style="fill:{paint(event.color)}" text-anchor="{side}" x="{place:.1f}" y="{TOP + 8}">'
    return f"{text}{escape(event.title)}</text>"


def _runs(points: Sequence[tuple[float, float]], gap: float) -> list[list[tuple[float, float]]]:
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


def _line(frame: Frame, curve: Curve, *, bridged: bool) -> str:
    parts = []
    gap = math.inf if bridged else 3 * frame.window.step
    for run in _runs(curve.points, gap):
        if bridged:
            run = [point for before, point in zip([(0.0, math.nan), *run], run, strict=False) if point[1] != before[1]]
        places = [(frame.x(at), frame.y(value)) for at, value in run]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line" style="stroke:{paint(curve.color)}" points="{path}"/>')
        if bridged or len(run) == 1:
            dots = [f'<circle r="2.4" cx="{x:.1f}" cy="{y:.1f}" style="fill:{paint(curve.color)}"/>' for x, y in places]
            parts += dots
    return "".join(parts)


def _area(frame: Frame, curve: Curve, floor: Curve | None, *, faint: bool = False) -> str:
    below = dict(floor.points) if floor else {}
    parts = []
    for run in _runs(curve.points, 3 * frame.window.step):
        top = [f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in run]
        under = [f"{frame.x(at):.1f},{frame.y(below.get(at, frame.low)):.1f}" for at, _ in reversed(run)]
        kind = "faint" if faint else "layer"
        path = "M" + " L".join([*top, *under]) + " Z"
        parts.append(
            f'<path class="{kind}" style="fill:{paint(curve.color)}" d="{path}"><title>{escape(curve.name)}</title></path>'
        )
    return "".join(parts)

"""A panel's chart as SVG: values in Grafana's units, ticks of the axes, lines, stacked areas, event
markers and sparklines.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from kdist.dashboards.model import Color, Panel
from kdist.dashboards.preview.curve import Curve, EventMarker, bound, limits, runs
from kdist.dashboards.prometheus import Window

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = {"Bps": "B/s", "cps": "/s", "flops": "FLOP/s"}
_DECIMAL = ("", "k", "M", "G", "T", "P")


def show(value: float, unit: str, *, decimals: int | None = None) -> str:
    """`value` in Grafana's `unit`: none, s, percentunit, bytes, Bps, cps, flops."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "s":
        return _seconds(value, decimals)
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f} %"
    if unit == "bytes":
        return _scaled(value, 1024, _BINARY)
    if unit in _RATES:
        text = _scaled(value, 1000, _DECIMAL, decimals=decimals)
        return f"{text}{'' if ' ' in text else ' '}{_RATES[unit]}"
    return _plain(value, decimals)


def _plain(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1e4:
        return _scaled(value, 1000, _DECIMAL).replace(" ", "")
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.2e}"


def _scaled(value: float, base: int, units: tuple[str, ...], *, decimals: int | None = None) -> str:
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    digits = (
        decimals
        if decimals is not None and not power
        else 0
        if abs(value) >= 100 or value == int(value)
        else 1
    )
    return f"{value:,.{digits}f} {units[power]}".rstrip()


def _seconds(value: float, decimals: int | None) -> str:
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if size < 1 and not decimals:
        return f"{value * 1e3:.3g} ms"
    if size < 60:
        return f"{value:.{1 if decimals is None and size < 10 else decimals or 0}f} s"
    minutes, seconds = divmod(round(size), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def axis(low: float, high: float, unit: str, *, most: int) -> list[tuple[float, str]]:
    """Round numbers between `low` and `high` and their texts: all in one unit, with the digits that
    tell them apart.
    """
    base, names = (1024, _BINARY) if unit == "bytes" else (1000, _DECIMAL)
    if unit == "s" or not high > low:
        return [(value, show(value, unit)) for value in ticks(low, high, most=most)]
    size = max(abs(low), abs(high)) * (100 if unit == "percentunit" else 1)
    plain = unit == "percentunit" or (unit == "none" and size < 1e5)
    power = 0 if plain or size < 1 else min(int(math.log(size, base) + 1e-9), len(names) - 1)
    scale = 0.01 if unit == "percentunit" else float(base**power)
    places = ticks(low / scale, high / scale, most=most)
    name = "%" if unit == "percentunit" else f"{names[power]}{_RATES.get(unit, '')}"
    apart = min((after - before for before, after in pairwise(places)), default=1.0)
    digits = next(
        (number for number in range(4) if math.isclose(round(apart, number), apart, rel_tol=1e-6)),
        None,
    )
    space = "" if unit == "none" else " "
    return [(place * scale, f"{_digits(place, digits)}{space}{name}".rstrip()) for place in places]


def _digits(value: float, digits: int | None) -> str:
    if abs(value) < 1e-12:
        return "0"
    return (
        f"{value:,.{digits}f}"
        if digits is not None
        else re.sub(r"(\.0)?e([+-])0*", r"e\2", f"{value:.1e}")
    )


def ticks(low: float, high: float, *, most: int = 4) -> list[float]:
    """Round numbers that divide the way from `low` to `high`, at most so many steps."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10 ** math.floor(math.log10(rough))
    step = next(
        (factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * 0.999),
        10 * size,
    )
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(start: float, end: float, *, most: int) -> list[float]:
    """Round times between two Unix times."""
    seconds_and_minutes = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)
    hours = (3600, 7200, 14400, 21600, 43200, 86400)
    sizes = seconds_and_minutes + hours
    step = next((size for size in sizes if (end - start) / size <= most), 86400)
    return [
        float(step * number)
        for number in range(math.ceil(start / step), math.floor(end / step) + 1)
    ]


RIGHT, TOP, BOTTOM = 10, 8, 20
_LEFT = 58
_CHARACTER = 6.3  # pixels of one in the text of an axis, at most


class Frame:
    """A picture of `width` x `height` for these values; `peak` is a value that the axis does not
    reach, if there is one.
    """

    def __init__(
        self, panel: Panel, values: Sequence[float], window: Window, width: int, height: int
    ) -> None:
        self.window = window
        self.width = width
        self.height = height
        self.logarithmic = panel.logarithmic
        known = [value for value in values if math.isfinite(value)]
        usual = bound(panel, known)
        self.peak = max(known) if usual is not None else None
        self.low, self.high = limits(
            panel,
            known if usual is None else [*(value for value in known if value <= usual), usual],
        )
        self.ticks = self._ticks(panel)
        self.left = max(
            _LEFT,
            math.ceil(12 + _CHARACTER * max((len(text) for _, text in self.ticks), default=0)),
        )

    def x(self, at: float) -> float:
        share = (at - self.window.start) / max(1e-9, self.window.end - self.window.start)
        return self.left + share * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        if self.logarithmic:
            share = math.log10(max(value, self.low) / self.low) / max(
                1e-9, math.log10(self.high / self.low)
            )
        else:
            share = (min(value, self.high) - self.low) / (self.high - self.low)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def _ticks(self, panel: Panel) -> list[tuple[float, str]]:
        if not self.logarithmic:
            return axis(self.low, self.high, panel.unit, most=4 if self.height > 140 else 3)
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        every = max(1, math.ceil((last - first) / 4))
        return [
            (10.0**power, show(10.0**power, panel.unit)) for power in range(first, last + 1, every)
        ]


_MOST_NAMED = 4


def paint(color: Color) -> str:
    """A colour for light and dark grounds, as CSS."""
    return f"light-dark({color[0]},{color[1]})"


def render_chart(
    panel: Panel,
    curves: Sequence[Curve],
    events: Sequence[EventMarker],
    window: Window,
    *,
    width: int,
    height: int,
) -> str:
    """The picture as an SVG element."""
    shown = pile(curves) if panel.stacked else list(curves)
    values = [
        value for curve in (shown[-1:] if panel.stacked else shown) for _, value in curve.points
    ]
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
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


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
    area = (
        f'<path class="faint" style="fill:{paint(curve.color)}" '
        f'd="M{first},{height} L{path} L{last},{height} Z"/>'
    )
    line = f'<polyline style="stroke:{paint(curve.color)}" points="{path}"/>'
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" '
        f'aria-hidden="true">{area}{line}</svg>'
    )


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
        parts.append(
            f'<line class="rule" x1="{frame.left}" x2="{frame.width - RIGHT}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" text-anchor="end" x="{frame.left - 8}" y="{y + 3.5:.1f}">'
            f"{escape(text)}</text>"
        )
    window = frame.window
    for at in time_ticks(window.start, window.end, most=max(2, frame.width // 75)):
        clock = time.strftime(
            "%H:%M:%S" if window.end - window.start < 1200 else "%H:%M", time.localtime(at)
        )
        x = frame.x(at)
        if frame.left + 14 < x < frame.width - RIGHT - 14:
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{frame.height - 4}">'
                f"{clock}</text>"
            )
    return "".join(parts)


def _peak(frame: Frame, peak: float, panel: Panel, curves: Sequence[Curve]) -> str:
    """Where a curve leaves the picture, and how far it goes."""
    at = next(at for curve in curves for at, value in curve.points if value == peak)
    x = frame.x(at)
    side, x = ("end", x - 6) if x > frame.width / 2 else ("start", x + 6)
    return (
        f'<text class="tick" text-anchor="{side}" x="{x:.1f}" y="{TOP + 8}">'
        f"up to {escape(show(peak, panel.unit))}</text>"
    )


def _event(frame: Frame, event: EventMarker) -> str:
    x, floor = frame.x(event.at), frame.height - BOTTOM
    style = f"stroke:{paint(event.color)}"
    top = TOP if event.loud else floor - 6
    kind = "loud" if event.loud else "quiet"
    return (
        f'<line class="event {kind}" style="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" '
        f'y2="{floor}">'
        f"<title>{escape(event.title)}</title></line>"
    )


def _name(frame: Frame, event: EventMarker) -> str:
    x = frame.x(event.at)
    side, place = ("end", x - 6) if x > frame.width * 0.8 else ("start", x + 6)
    return (
        f'<text class="name over" style="fill:{paint(event.color)}" text-anchor="{side}" '
        f'x="{place:.1f}" y="{TOP + 8}">{escape(event.title)}</text>'
    )


def _line(frame: Frame, curve: Curve, *, bridged: bool) -> str:
    parts = []
    gap = math.inf if bridged else 3 * frame.window.step
    for run in runs(curve.points, gap):
        if bridged:
            run = [
                point
                for before, point in zip([(0.0, math.nan), *run], run, strict=False)
                if point[1] != before[1]
            ]
        places = [(frame.x(at), frame.y(value)) for at, value in run]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline class="line" style="stroke:{paint(curve.color)}" points="{path}"/>'
        )
        if bridged or len(run) == 1:
            dots = [
                f'<circle r="2.4" cx="{x:.1f}" cy="{y:.1f}" style="fill:{paint(curve.color)}"/>'
                for x, y in places
            ]
            parts += dots
    return "".join(parts)


def _area(frame: Frame, curve: Curve, floor: Curve | None, *, faint: bool = False) -> str:
    below = dict(floor.points) if floor else {}
    parts = []
    for run in runs(curve.points, 3 * frame.window.step):
        top = [f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in run]
        under = [
            f"{frame.x(at):.1f},{frame.y(below.get(at, frame.low)):.1f}" for at, _ in reversed(run)
        ]
        kind = "faint" if faint else "layer"
        path = "M" + " L".join([*top, *under]) + " Z"
        parts.append(
            f'<path class="{kind}" style="fill:{paint(curve.color)}" d="{path}">'
            f"<title>{escape(curve.name)}</title></path>"
        )
    return "".join(parts)

"""The goodput receipt of a run as one HTML page without scripts, fonts or links: the loss curve,
the timeline of the attempts, and the share of each category, drawn as SVG. `STYLE` is the style
sheet that receipts and benches share. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from kdist.report import text
from kdist.report.text import LABELS
from kdist.units import number, seconds

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667085; --line: #e3e6ea; \
--paper: #ffffff; --card: #f7f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #98a2b3; --line: #2f353d; --paper: #14171b; --card: #1b1f25; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 960px; margin: 32px auto; padding: 0 20px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 32px 0 8px; } \
.soft { color: var(--soft); }
svg { width: 100%; height: auto; background: var(--card); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
.grid { stroke: var(--line); } .tick { fill: var(--soft); font-size: 11px; }
"""


WIDTH, LOSS_HEIGHT, ROW_HEIGHT = 920, 260, 22
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 34

Point = Sequence[float]


def loss(points: Sequence[Point], marks: Sequence[float]) -> str:
    """The loss over the steps, logarithmic where it spans more than a decade; `marks` are steps at
    which an attempt began.
    """
    if len(points) < 2:
        return "<p>Too few steps were noted to draw a loss.</p>"
    values = [value for _, value in points]
    log = min(values) > 0 and max(values) / min(values) > 10
    scale = [math.log10(value) if log else value for value in values]
    low, high = min(scale), max(scale)
    first, last = points[0][0], points[-1][0]

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(last - first, 1) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / ((high - low) or 1) * (LOSS_HEIGHT - _TOP - _BOTTOM)

    line = " ".join(
        f"{x(step):.1f},{y(value):.1f}" for (step, _), value in zip(points, scale, strict=True)
    )
    parts = [*_grid(low, high, log, y), *_ticks(first, last, x)]
    parts += [
        f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" '
        f'y2="{LOSS_HEIGHT - _BOTTOM}"/>'
        for at in marks
    ]
    parts.append(f'<polyline class="loss" points="{line}"/>')
    return _svg(LOSS_HEIGHT, "loss over steps", parts)


def _grid(low: float, high: float, log: bool, y: Any) -> Iterator[str]:
    for value in _decades(low, high) if log else _round(low, high, most=5):
        shown = number(float(f"{math.pow(10, value) if log else value:.6g}"), 3)
        yield (
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" '
            f'y2="{y(value):.1f}"/>'
        )
        yield (
            f'<text class="tick" x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">'
            f"{shown}</text>"
        )


def _ticks(first: float, last: float, x: Any) -> Iterator[str]:
    for step in _round(first, last, most=8):
        yield (
            f'<text class="tick" x="{x(step):.1f}" y="{LOSS_HEIGHT - 12}" text-anchor="middle">'
            f"{number(round(step))}</text>"
        )
    yield f'<text class="tick" x="{_LEFT - 8}" y="{LOSS_HEIGHT - 12}" text-anchor="end">step</text>'


def _decades(low: float, high: float) -> list[float]:
    """Logarithms of round numbers between two logarithms: 1, 2 and 5 of each decade, or 1 alone
    where there are many.
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = max(1, len(powers) // 6)
    found = [
        power + math.log10(factor)
        for power in powers[::every]
        for factor in ((1, 2, 5) if len(powers) < 5 else (1,))
    ]
    return [value for value in found if low <= value <= high]


def _round(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers between two, at most about so many."""
    way = high - low
    if not 0 < way < math.inf:
        return [low]
    size = 10.0 ** math.floor(math.log10(way / most))
    apart = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= way / most * 0.999)
    return [apart * count for count in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def _clock(length: float) -> list[float]:
    """Round durations up to a length in seconds."""
    sizes = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
    apart = next((size for size in sizes if length / size <= 8), None)
    return (
        _round(0.0, length, most=8)
        if apart is None or length < 4
        else [float(at) for at in range(0, int(length) + 1, apart)]
    )


def timeline(attempts: Sequence[Mapping[str, Any]]) -> str:
    """One row per attempt over the wall time, each stretch in its category's colour, with its words
    on hover.
    """
    spans = [span for one in attempts for span in one["spans"]]
    if not spans:
        return "<p>Nothing was noted of this run yet.</p>"
    began, ended = float(min(span[1] for span in spans)), float(max(span[2] for span in spans))

    def x(at: float) -> float:
        return _LEFT + float(at - began) / ((ended - began) or 1) * (WIDTH - _LEFT - _RIGHT)

    parts = []
    for row, one in enumerate(attempts):
        top = _TOP + row * ROW_HEIGHT
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">'
            f"{escape(str(one['generation']))}</text>"
        )
        for category, since, until in one["spans"]:
            words = escape(f"{LABELS.get(category, category)}: {seconds(until - since)}")
            width = max(x(until) - x(since), 0.5)
            parts.append(
                f'<rect class="{escape(category)}" x="{x(since):.1f}" y="{top}" '
                f'width="{width:.1f}" height="{ROW_HEIGHT - 6}">'
                f"<title>{words}</title></rect>"
            )
    height = _TOP + len(attempts) * ROW_HEIGHT + _BOTTOM
    for at in _clock(ended - began):
        shown = seconds(at) if at else "0"
        parts.append(
            f'<text class="tick" x="{x(began + at):.1f}" y="{height - 12}" text-anchor="middle">'
            f"{shown}</text>"
        )
    return _svg(height, "wall time of each attempt by category", parts)


def share_bar(found: Mapping[str, float]) -> str:
    """The whole run as one bar of its categories."""
    whole = sum(found.values())
    at, parts = 0.0, []
    for category, label in LABELS.items():
        part = found.get(category, 0.0)
        if part > 0 and whole > 0:
            words = escape(f"{label}: {seconds(part)}, {part / whole:.1%}")
            width = part / whole * WIDTH
            parts.append(
                f'<rect class="{category}" x="{at:.1f}" y="0" width="{width:.1f}" height="34">'
                f"<title>{words}</title></rect>"
            )
            at += width
    return _svg(34, "share of each category", parts)


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


COLORS = {
    "queue": "#8d99ae",
    "imagePull": "#6c8ebf",
    "rendezvous": "#b39ddb",
    "start": "#64b5f6",
    "productive": "#2e9e5b",
    "allReduceWait": "#f2b134",
    "checkpoint": "#26a69a",
    "lost": "#e4572e",
    "down": "#a4161a",
    "unobserved": "#dedede",
    "other": "#bdbdbd",
}

_STYLE = """
.goodput { font-size: 44px; font-weight: 650; letter-spacing: -1px; margin: 12px 0 0; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.loss { fill: none; stroke: #2e9e5b; stroke-width: 1.6; }
.mark { stroke: #e4572e; stroke-dasharray: 3 3; }
"""


def render_page(report: Mapping[str, Any]) -> str:
    """The page of a receipt, as `build_receipt` makes it, with the job's name."""
    name, goodput = escape(str(report.get("job", "run"))), report.get("goodput")
    shown = f"{goodput:.1%}" if goodput is not None else "-"
    whole = escape(seconds(report["elapsedSeconds"]))
    colours = "\n".join(
        f"rect.{category} {{ fill: {colour}; }}" for category, colour in COLORS.items()
    )
    marks = [float(one["fromStep"]) for one in report["attempts"][1:]]
    failures = [
        (str(one["generation"]), _why(one)) for one in report["attempts"] if one.get("failure")
    ]
    sections = [
        f"<h1>{name}</h1><p class=soft>{escape(text.course(report))}</p>",
        f"<p class=goodput>{shown}</p>",
        (
            f"<p class=soft>goodput: the share of {whole} that went into steps that count, "
            "waiting for peers included</p>"
        ),
        share_bar(report["secondsByCategory"]),
        "<h2>Where the time went</h2>"
        + _table(("category", "time", "share"), text.totals(report), swatches=True),
        "<h2>Loss, and where an attempt began</h2>" + loss(report["lossCurve"], marks),
        "<h2>Wall time, one row per attempt; what its steps went into is summed up</h2>"
        + timeline(report["attempts"]),
        "<h2>Attempts</h2>"
        + _table([cell.lower() for cell in text.ATTEMPTS], text.attempts(report)),
    ]
    if failures:
        sections.append("<h2>What ended them</h2>" + _table(("attempt", "failure"), failures))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{name}: goodput receipt</title>\n"
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}{_STYLE}{colours}\n</style></head>\n"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _why(one: Mapping[str, Any]) -> str:
    failure = one["failure"]
    where = ", ".join(
        f"{name} {failure[name]}"
        for name in ("rank", "node", "step")
        if failure.get(name) is not None
    )
    return f"{one['endedBy']} ({where}): {failure.get('message') or ''}"


def _table(header: Iterable[str], rows: Sequence[Sequence[str]], *, swatches: bool = False) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    by_label = {label: COLORS[category] for category, label in text.LABELS.items()}
    lines = []
    for row in rows:
        colour = by_label.get(row[0]) if swatches else None
        swatch = f'<span class=swatch style="background:{colour}"></span>' if colour else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f"<tr><td>{swatch}{escape(row[0])}</td>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"

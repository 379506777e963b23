"""Drawings of a run as SVG text, to stand inside an HTML page: the loss over the steps, and where the time went. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from kdist.quantity import number, seconds
from kdist.report.words import LABELS

WIDTH, LOSS_HEIGHT, ROW_HEIGHT = 920, 260, 22
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 34

Point = Sequence[float]


def loss(points: Sequence[Point], marks: Sequence[float]) -> str:
    """The loss over the steps, logarithmic where it spans more than a decade; `marks` are steps at which an attempt began."""
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

    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for (step, _), value in zip(points, scale, strict=True))
    parts = [*_grid(low, high, log, y), *_ticks(first, last, x)]
    parts += [f'<line class="mark" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{LOSS_HEIGHT - _BOTTOM}"/>' for at in marks]
    parts.append(f'<polyline class="loss" points="{line}"/>')
    return _svg(LOSS_HEIGHT, "loss over steps", parts)


def _grid(low: float, high: float, log: bool, y: Any) -> Iterator[str]:
    for value in _decades(low, high) if log else _round(low, high, most=5):
        shown = number(float(f"{math.pow(10, value) if log else value:.6g}"), 3)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{shown}</text>'


def _ticks(first: float, last: float, x: Any) -> Iterator[str]:
    for step in _round(first, last, most=8):
        yield f'<text class="tick" x="{x(step):.1f}" y="{LOSS_HEIGHT - 12}" text-anchor="middle">{number(round(step))}</text>'
    yield f'<text class="tick" x="{_LEFT - 8}" y="{LOSS_HEIGHT - 12}" text-anchor="end">step</text>'


def _decades(low: float, high: float) -> list[float]:
    """Logarithms of round numbers between two logarithms: 1, 2 and 5 of each decade, or 1 alone where there are many."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    every = max(1, len(powers) // 6)
    found = [power + math.log10(factor) for power in powers[::every] for factor in ((1, 2, 5) if len(powers) < 5 else (1,))]
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
    return _round(0.0, length, most=8) if apart is None or length < 4 else [float(at) for at in range(0, int(length) + 1, apart)]


def timeline(attempts: Sequence[Mapping[str, Any]]) -> str:
    """One row per attempt over the wall time, each stretch in its category's colour, with its words on hover."""
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
            f'<text class="tick" x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(str(one["generation"]))}</text>'
        )
        for category, since, until in one["spans"]:
            words = escape(f"{LABELS.get(category, category)}: {seconds(until - since)}")
            width = max(x(until) - x(since), 0.5)
            parts.append(
                f'<rect class="{escape(category)}" x="{x(since):.1f}" y="{top}" width="{width:.1f}" height="{ROW_HEIGHT - 6}">'
                f"<title>{words}</title></rect>"
            )
    height = _TOP + len(attempts) * ROW_HEIGHT + _BOTTOM
    for at in _clock(ended - began):
        shown = seconds(at) if at else "0"
        parts.append(f'<text class="tick" x="{x(began + at):.1f}" y="{height - 12}" text-anchor="middle">{shown}</text>')
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
                f'<rect class="{category}" x="{at:.1f}" y="0" width="{width:.1f}" height="34"><title>{words}</title></rect>'
            )
            at += width
    return _svg(34, "share of each category", parts)


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'

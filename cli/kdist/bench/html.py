"""A bench as one HTML page that needs nothing else: bandwidth and latency over the size, and the
pairs of ranks. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from kdist.bench.result import COLUMNS, Result, duration
from kdist.report.html import STYLE
from kdist.units import rate, size

_WIDTH, _HEIGHT = 920, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 14, 34
_CELL, _MOST_CELLS = 34, 24
_STYLE = """
.line { fill: none; stroke-width: 1.8; } .busbw, .p50 { stroke: #2e9e5b; } \
.algbw { stroke: #64b5f6; } .p99 { stroke: #e4572e; }
text.busbw, text.p50 { fill: #2e9e5b; stroke: none; } text.algbw { fill: #64b5f6; stroke: none; }
text.p99 { fill: #e4572e; stroke: none; } .slow { stroke: #e4572e; stroke-width: 3; }
"""


def render_page(result: Result) -> str:
    """The page."""
    sections = [
        f"<h1>{escape(result.collective)}</h1><p class=soft>{escape(result.headline())}</p>"
    ]
    if any(row["size"] for row in result.rows):
        sections += ["<h2>Bandwidth over the size</h2>" + curves(result, ("busbw", "algbw"))]
        sections += ["<h2>Time of a round over the size</h2>" + curves(result, ("p50", "p99"))]
    head = "".join(f"<th>{cell.lower()}</th>" for cell in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in result.table()
    )
    sections += [f"<h2>Every size</h2><table><tr>{head}</tr>{rows}</table>"]
    if result.pairs:
        sections += [
            f"<h2>Every pair of ranks</h2><p>{escape(result.verdict())}</p>" + matrix(result)
        ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(result.collective)} bench</title>\n"
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}{_STYLE}</style></head>\n"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def curves(result: Result, names: Sequence[str]) -> str:
    """These fields of all rows over the size, both on logarithmic axes."""
    rows = [row for row in result.rows if row["size"] and all(row[name] for name in names)]
    if len(rows) < 2:
        return "<p class=soft>One size is no curve.</p>"
    show = rate if names[0] == "busbw" else duration
    values = [math.log10(row[name]) for row in rows for name in names]
    low, high = math.floor(min(values)), math.ceil(max(values))
    first, last = math.log2(rows[0]["size"]), math.log2(rows[-1]["size"])

    def x(nbytes: float) -> float:
        return _LEFT + (math.log2(nbytes) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - math.log10(value)) / max(high - low, 1) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">'
            f"{show(10.0**power)}</text>"
        )
    parts += [
        f'<text class="tick" x="{x(row["size"]):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        f"{size(row['size'])}</text>"
        for row in rows
    ]
    for number, name in enumerate(names):
        points = " ".join(f"{x(row['size']):.1f},{y(row[name]):.1f}" for row in rows)
        parts.append(f'<polyline class="line {name}" points="{points}"/>')
        parts.append(
            f'<text class="{name}" x="{_LEFT + 12}" y="{_TOP + 16 + 18 * number}">{name}</text>'
        )
    return _svg(_WIDTH, _HEIGHT, f"{' and '.join(names)} over the size", parts)


def matrix(result: Result) -> str:
    """A square for each two ranks, the darker the slower; the slow one framed."""
    ranks = min(len(result.pairs), _MOST_CELLS)
    known = [value for row in result.pairs for value in row if value]
    if not known:
        return ""
    low, high = min(known), max(known)
    parts = list(_cells(result, ranks, low, high))
    side = (ranks + 1) * _CELL + 8
    return _svg(
        _WIDTH, side, f"seconds of a message of {size(result.pair_size)} between two ranks", parts
    )


def _cells(result: Result, ranks: int, low: float, high: float) -> Iterator[str]:
    slow = set(result.slow["ranks"]) if result.slow else set()
    for one in range(ranks):
        at = (one + 1) * _CELL
        yield f'<text class="tick" x="{_CELL - 8}" y="{at + 20}" text-anchor="end">{one}</text>'
        yield f'<text class="tick" x="{at + 14}" y="{_CELL - 8}" text-anchor="middle">{one}</text>'
        for other in range(ranks):
            value = result.pairs[one][other]
            if value is None:
                continue
            shade = 0.12 + 0.88 * (value - low) / ((high - low) or 1)
            framed = ' class="slow"' if slow and slow <= {one, other} else ""
            words = (
                f"{one} and {other}: {duration(value)} ({result.nodes[one]}, {result.nodes[other]})"
            )
            yield (
                f'<rect{framed} x="{(other + 1) * _CELL}" y="{at}" width="{_CELL - 4}" '
                f'height="{_CELL - 4}" rx="3" '
                f'fill="#2e6f9e" fill-opacity="{shade:.2f}"><title>{escape(words)}</title></rect>'
            )


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )

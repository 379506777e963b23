"""The receipt as one HTML page that needs nothing else: no script, no font, no address. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from kdist.quantity import seconds
from kdist.report import plot, words
from kdist.report.style import STYLE

COLORS = {
    "queue": "#8d99ae", "imagePull": "#6c8ebf", "rendezvous": "#b39ddb", "start": "#64b5f6", "productive": "#2e9e5b",
    "allReduceWait": "#f2b134", "checkpoint": "#26a69a", "lost": "#e4572e", "down": "#a4161a",
    "unobserved": "#dedede", "other": "#bdbdbd",
}  # fmt: skip

_STYLE = """
.goodput { font-size: 44px; font-weight: 650; letter-spacing: -1px; margin: 12px 0 0; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.loss { fill: none; stroke: #2e9e5b; stroke-width: 1.6; }
.mark { stroke: #e4572e; stroke-dasharray: 3 3; }
"""


def draw(report: Mapping[str, Any]) -> str:
    """The page of a receipt, as `build_receipt` makes it, with the job's name."""
    name, goodput = escape(str(report.get("job", "run"))), report.get("goodput")
    shown = f"{goodput:.1%}" if goodput is not None else "-"
    whole = escape(seconds(report["elapsedSeconds"]))
    colours = "\n".join(f"rect.{category} {{ fill: {colour}; }}" for category, colour in COLORS.items())
    marks = [float(one["fromStep"]) for one in report["attempts"][1:]]
    failures = [(str(one["generation"]), _why(one)) for one in report["attempts"] if one.get("failure")]
    sections = [
        f"<h1>{name}</h1><p class=soft>{escape(words.course(report))}</p>",
        f"<p class=goodput>{shown}</p>",
        f"<p class=soft>goodput: the share of {whole} that went into steps that count, waiting for peers included</p>",
        plot.share_bar(report["secondsByCategory"]),
        "<h2>Where the time went</h2>" + _table(("category", "time", "share"), words.totals(report), swatches=True),
        "<h2>Loss, and where an attempt began</h2>" + plot.loss(report["lossCurve"], marks),
        "<h2>Wall time, one row per attempt; what its steps went into is summed up</h2>" + plot.timeline(report["attempts"]),
        "<h2>Attempts</h2>" + _table([cell.lower() for cell in words.ATTEMPTS], words.attempts(report)),
    ]
    if failures:
        sections.append("<h2>What ended them</h2>" + _table(("attempt", "failure"), failures))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: goodput receipt</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{_STYLE}{colours}\n</style></head>\n'
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _why(one: Mapping[str, Any]) -> str:
    failure = one["failure"]
    where = ", ".join(f"{name} {failure[name]}" for name in ("rank", "node", "step") if failure.get(name) is not None)
    return f"{one['endedBy']} ({where}): {failure.get('message') or ''}"


def _table(header: Iterable[str], rows: Sequence[Sequence[str]], *, swatches: bool = False) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    by_label = {label: COLORS[category] for category, label in words.LABELS.items()}
    lines = []
    for row in rows:
        colour = by_label.get(row[0]) if swatches else None
        swatch = f'<span class=swatch style="background:{colour}"></span>' if colour else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f"<tr><td>{swatch}{escape(row[0])}</td>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"

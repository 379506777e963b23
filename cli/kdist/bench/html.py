"""The result of a bench as one HTML page: bandwidth and latency over the size, and the time between
each pair of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kdist.bench.result import COLUMNS, Result, duration
from kdist.report.chart import Plot, decade_ticks, decades, svg, tick_text
from kdist.report.page import (
    DOCUMENT,
    SERIES,
    STATUS,
    Markup,
    element,
    join,
    legend,
    legend_key,
    paint,
    render_page,
    table,
)
from kdist.units import rate, size

_WIDTH, _HEIGHT, _LEFT = 920, 280, 84
_CELL, _MOST_RANKS = 34, 24
_COLORS = {"busbw": SERIES[2], "algbw": SERIES[0], "p50": SERIES[2], "p99": SERIES[1]}
_STYLE = f".slow {{ stroke: {paint(STATUS['bad'])}; stroke-width: 3 }}\n"


def render_result(result: Result) -> str:
    """The page of a result."""
    sections = [element("h1", result.collective), element("p", result.headline(), class_="soft")]
    if any(row["size"] for row in result.rows):
        sections += [
            element("h2", "Bandwidth by message size"),
            render_curves(result, ("busbw", "algbw")),
            element("h2", "Round time by message size"),
            render_curves(result, ("p50", "p99")),
        ]
    sections += [
        element("h2", "Every size"),
        table([cell.lower() for cell in COLUMNS], result.table()),
    ]
    if result.pairs:
        sections += [
            element("h2", "Every pair of ranks"),
            element("p", result.describe_pairs()),
            render_matrix(result),
        ]
    return render_page(f"{result.collective} bench", *sections, style=DOCUMENT + _STYLE)


def render_curves(result: Result, names: Sequence[str]) -> Markup:
    """These columns of all rows over the size, on logarithmic axes."""
    rows = [row for row in result.rows if row["size"] and all(row[name] for name in names)]
    if len(rows) < 2:
        return element("p", "A curve needs at least two sizes.", class_="soft")
    text = rate if names[0] == "busbw" else duration
    values = [row[name] for row in rows for name in names]
    low, high = decades(min(values), max(values))
    sizes = float(rows[0]["size"]), float(rows[-1]["size"])
    plot = Plot(_WIDTH, _HEIGHT, x=sizes, y=(low, high), left=_LEFT, logarithmic="xy")
    chart = plot.render(
        f"{' and '.join(names)} by message size",
        plot.y_axis((value, text(value)) for value in decade_ticks(low, high, most=6)),
        plot.x_axis((row["size"], size(row["size"])) for row in rows),
        *(
            plot.line(
                ((row["size"], row[name]) for row in rows), style=f"stroke:{paint(_COLORS[name])}"
            )
            for name in names
        ),
    )
    return join(chart, legend(*(legend_key(name, _COLORS[name]) for name in names)))


def render_matrix(result: Result) -> Markup:
    """A square for each pair of ranks, the darker the slower; the slow ones have a frame."""
    times = [value for row in result.pairs for value in row if value]
    if not times:
        return Markup()
    ranks = min(len(result.pairs), _MOST_RANKS)
    title = f"seconds of a message of {size(result.pair_size)} between two ranks"
    height = (ranks + 1) * _CELL + 8
    return svg(_WIDTH, height, title, *_cells(result, ranks, min(times), max(times)))


def _cells(result: Result, ranks: int, low: float, high: float) -> Iterator[Markup]:
    slow = set(result.slow["ranks"]) if result.slow else set()
    for rank in range(ranks):
        start = (rank + 1) * _CELL
        yield tick_text(str(rank), _CELL - 8, start + 20, anchor="end")
        yield tick_text(str(rank), start + 14, _CELL - 8)
        for peer in range(ranks):
            value = result.pairs[rank][peer]
            if value is None:
                continue
            shade = 0.12 + 0.88 * (value - low) / ((high - low) or math.inf)
            nodes = f"{result.nodes[rank]}, {result.nodes[peer]}"
            yield element(
                "rect",
                element("title", f"{rank} and {peer}: {duration(value)} ({nodes})"),
                class_="slow" if slow and slow <= {rank, peer} else None,
                x=(peer + 1) * _CELL,
                y=start,
                width=_CELL - 4,
                height=_CELL - 4,
                rx=3,
                fill=SERIES[0][0],
                fill_opacity=f"{shade:.2f}",
            )

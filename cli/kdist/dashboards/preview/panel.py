"""One panel of a dashboard as HTML: its queries are sent to Prometheus, and the answers shown as a
stat, bars, a table or a chart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from kdist.dashboards.model import STATUS, Color, Kind, Panel, Step, color_of
from kdist.dashboards.preview import svg
from kdist.dashboards.preview.curve import Curve, EventMarker
from kdist.dashboards.preview.svg import paint
from kdist.dashboards.prometheus import Labels, Series, Window

COLUMN, LINE = 64, 38
"""Pixels of a column and of a line of the grid."""

_MOST_BARS = 9
# pixels in a legend: around a key, of a character at most, that the last keys may need
_GAP, _CHARACTER, _MORE = 29, 6.4, 110
Ask = Callable[[str], Sequence[Series]]


@dataclass(frozen=True)
class PanelSource:
    """Answers a panel's queries: `over` time, or `now`; a query is as the panel has it."""

    over: Ask
    now: Ask
    window: Window


def render_panel(panel: Panel, source: PanelSource, events: Sequence[EventMarker]) -> str:
    """The inside of the panel's card."""
    if panel.kind is Kind.STAT:
        return _stat(panel, source)
    if panel.kind is Kind.BARS:
        return _bars(panel, source)
    if panel.kind is Kind.TABLE:
        return _table(panel, source)
    return _lines(panel, source, events)


def name_of(legend: str, labels: Labels) -> str:
    """A series' name: the legend with the labels' values in it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend).strip()


def curves_of(panel: Panel, ask: Ask) -> list[Curve]:
    """All series of the panel's queries, named and coloured, in the order of their names within a
    query.
    """
    found: list[tuple[str, Series]] = []
    for legend, query in panel.queries.items():
        found += sorted(
            ((name_of(legend, one.labels), one) for one in ask(query)),
            key=lambda pair: _order(pair[0]),
        )
    return [
        Curve(name, color_of(name, index), one.points) for index, (name, one) in enumerate(found)
    ]


def _order(name: str) -> tuple[str, int, str]:
    number = re.search(r"(\d+)$", name)
    return (name[: number.start()], int(number[1]), "") if number else (name, 0, "")


def _lines(panel: Panel, source: PanelSource, events: Sequence[EventMarker]) -> str:
    curves = [
        curve
        for curve in curves_of(panel, source.over)
        if not panel.stacked or any(value for _, value in curve.points)
    ]
    if not curves:
        return _nothing()
    if panel.stacked:
        curves.sort(
            key=lambda curve: -math.fsum(value for _, value in curve.points if math.isfinite(value))
        )
    width, height = panel.width * COLUMN - 30, panel.height * LINE - 78
    picture = svg.render_chart(panel, curves, events, source.window, width=width, height=height)
    return f'{picture}<div class="legend">{_legend(panel, curves, 2 * width)}</div>'


def _legend(panel: Panel, curves: Sequence[Curve], room: int) -> str:
    """A key for each curve, as far as they fit into so many pixels."""
    keys: list[str] = []
    for index, curve in enumerate(curves):
        value = svg.show(curve.last, panel.unit, decimals=panel.decimals)
        room -= _GAP + math.ceil(_CHARACTER * (len(curve.name) + len(value) + 1))
        if room < (_MORE if index < len(curves) - 1 else 0):
            return f"{''.join(keys)}<span>{len(curves) - index} more</span>"
        keys.append(_key(curve.name, curve.color, value))
    return "".join(keys)


def _key(name: str, color: Color, value: str) -> str:
    return (
        f'<span><i style="background:{paint(color)}"></i>'
        f"{escape(name.replace('_', ' '))} <b>{escape(value)}</b></span>"
    )


def _stat(panel: Panel, source: PanelSource) -> str:
    if panel.shows_name:
        words = sorted(
            {
                name_of("{{state}}", one.labels)
                for query in panel.queries.values()
                for one in source.now(query)
            }
        )
        return f'<div class="value word">{escape(", ".join(words) or "no answer")}</div>'
    curves = curves_of(panel, source.over)
    known = [curve for curve in curves if curve.points]
    if not known:
        return _nothing()
    curve = known[0]
    color = _status(panel.steps, curve.last)
    value = svg.show(curve.last, panel.unit, decimals=panel.decimals)
    number, _, unit = value.partition(" ")
    text = f"{escape(number)}<small> {escape(unit)}</small>" if unit else escape(number)
    style = "" if not panel.steps else f' style="color:{paint(color)}"'
    trend = svg.spark(
        Curve(curve.name, color if panel.steps else STATUS["neutral"], curve.points),
        source.window,
        width=200,
        height=34,
    )
    return f'<div class="value"{style}>{text}</div>{trend}'


def _status(steps: Sequence[Step], value: float) -> Color:
    color = STATUS["neutral"]
    for step in steps:
        if step.value is None or value >= step.value:
            color = STATUS[step.color]
    return color


def _bars(panel: Panel, source: PanelSource) -> str:
    shown = [(curve.name, curve.last, curve.color) for curve in curves_of(panel, source.now)]
    shown = sorted((one for one in shown if math.isfinite(one[1])), key=lambda one: -one[1])[
        :_MOST_BARS
    ]
    if not shown:
        return _nothing()
    most = max(value for _, value, _ in shown) or 1
    rows = []
    for name, value, color in shown:
        fill = paint(_status(panel.steps, value) if panel.steps else color)
        share = max(0.6, value / most * 100)
        bar = f'<div class="bar"><i style="width:{share:.1f}%;background:{fill}"></i></div>'
        shown_value = escape(svg.show(value, panel.unit))
        rows.append(f"<div>{escape(name.replace('_', ' '))}</div>{bar}<b>{shown_value}</b>")
    return f'<div class="bars">{"".join(rows)}</div>'


def _table(panel: Panel, source: PanelSource) -> str:
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for column, query in panel.queries.items():
        for one in sorted(source.now(query), key=lambda series: series.labels.get(panel.word, "")):
            cells = rows.setdefault(
                (one.labels.get("namespace", ""), one.labels.get("kdist_job", "")), {}
            )
            if column.lower() == panel.word:
                word = one.labels.get(panel.word, "")
                cells[column] = (
                    f"{cells[column]}, {escape(word)}" if column in cells else escape(word)
                )
            else:
                cells[column] = _cell(panel, column, one.last)
    if not rows:
        return _nothing()
    head = "".join(f"<th>{escape(column)}</th>" for column in panel.queries)
    body = []
    for (namespace, job), cells in sorted(rows.items()):
        values = "".join(f"<td>{cells.get(column, '-')}</td>" for column in panel.queries)
        body.append(f"<tr><th>{escape(job)}<small> {escape(namespace)}</small></th>{values}</tr>")
    return (
        f'<div class="table"><table><tr><th>Training</th>{head}</tr>{"".join(body)}</table></div>'
    )


def _cell(panel: Panel, column: str, value: float) -> str:
    text = escape(svg.show(value, (panel.units or {}).get(column, panel.unit)))
    steps = (panel.column_steps or {}).get(column, ())
    return f'<span style="color:{paint(_status(steps, value))}">{text}</span>' if steps else text


def _nothing() -> str:
    return '<div class="nothing">nothing to show</div>'

"""One panel of a dashboard as HTML: its queries are sent to Prometheus, and the answers shown as a
stat, bars, a table or a chart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdist.report.page import STATUS, Color, Markup, element, join, paint, swatch, table
from tools.dashboards.chart import render_chart, render_sparkline
from tools.dashboards.curve import Curve, EventMarker
from tools.dashboards.model import Kind, Panel, Threshold, color_of
from tools.dashboards.prometheus import Labels, Series, Window
from tools.dashboards.values import format_value

COLUMN, LINE = 64, 38
"""Pixels of a column and of a line of the grid."""

_MOST_BARS = 9
# pixels in a legend: around a key, of a character at most, that the last keys may need
_GAP, _CHARACTER, _MORE = 29, 6.4, 110
_NOTHING = element("div", "nothing to show", class_="nothing")

Ask = Callable[[str], Sequence[Series]]


@dataclass(frozen=True)
class PanelSource:
    """Answers a panel's queries: `over` the window, or `now`; a query is as the panel has it."""

    over: Ask
    now: Ask
    window: Window


def render_panel(panel: Panel, source: PanelSource, events: Sequence[EventMarker]) -> Markup:
    """The inside of the panel's card."""
    if panel.kind is Kind.STAT:
        return _names(panel, source) if panel.shows_name else _stat(panel, source)
    if panel.kind is Kind.BARS:
        return _bars(panel, source)
    if panel.kind is Kind.TABLE:
        return _table(panel, source)
    return _chart(panel, source, events)


def name_of(template: str, labels: Labels) -> str:
    """A series' name: the template of its query's legend with the labels' values in it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), template).strip()


def curves_of(panel: Panel, ask: Ask) -> list[Curve]:
    """All series of the panel's queries, named and colored, in the order of their names within a
    query.
    """
    found: list[tuple[str, Series]] = []
    for template, query in panel.queries.items():
        found += sorted(
            ((name_of(template, one.labels), one) for one in ask(query)),
            key=lambda pair: _order(pair[0]),
        )
    return [
        Curve(name, color_of(name, index), one.points) for index, (name, one) in enumerate(found)
    ]


def _order(name: str) -> tuple[str, int, str]:
    """Names that end in a number are ordered by it: `rank 2` before `rank 10`."""
    number = re.search(r"(\d+)$", name)
    return (name[: number.start()], int(number[1]), "") if number else (name, 0, "")


def _chart(panel: Panel, source: PanelSource, events: Sequence[EventMarker]) -> Markup:
    curves = curves_of(panel, source.over)
    if panel.stacked:
        curves = [curve for curve in curves if any(value for _, value in curve.points)]
        curves.sort(key=lambda curve: -math.fsum(value for _, value in curve.finite))
    if not curves:
        return _NOTHING
    width, height = panel.width * COLUMN - 30, panel.height * LINE - 78
    chart = render_chart(panel, curves, events, source.window, width=width, height=height)
    return join(chart, element("div", *_keys(panel, curves, 2 * width), class_="legend"))


def _keys(panel: Panel, curves: Sequence[Curve], room: int) -> list[Markup]:
    """The legend's keys, as many as fit into so many pixels, and the number of the others."""
    keys: list[Markup] = []
    for index, curve in enumerate(curves):
        value = format_value(curve.last, panel.unit, decimals=panel.decimals)
        room -= _GAP + math.ceil(_CHARACTER * (len(curve.name) + len(value) + 1))
        if room < (_MORE if index < len(curves) - 1 else 0):
            return [*keys, element("span", f"{len(curves) - index} more")]
        number = join(" ", element("b", value)) if value else ""
        keys.append(element("span", swatch(curve.color), _words(curve.name), number))
    return keys


def _words(name: str) -> str:
    return name.replace("_", " ")


def _names(panel: Panel, source: PanelSource) -> Markup:
    answers = [one for query in panel.queries.values() for one in source.now(query)]
    names = sorted({name_of("{{state}}", one.labels) for one in answers})
    return element("div", ", ".join(names) or "no answer", class_="value word")


def _stat(panel: Panel, source: PanelSource) -> Markup:
    curve = next((curve for curve in curves_of(panel, source.over) if curve.points), None)
    if curve is None:
        return _NOTHING
    color = _status(panel.thresholds, curve.last)
    value = format_value(curve.last, panel.unit, decimals=panel.decimals)
    number, _, unit = value.partition(" ")
    trend = Curve(curve.name, color if panel.thresholds else STATUS["neutral"], curve.points)
    return join(
        element(
            "div",
            number,
            element("small", f" {unit}") if unit else "",
            class_="value",
            style=f"color:{paint(color)}" if panel.thresholds else None,
        ),
        render_sparkline(trend, source.window, width=200, height=34),
    )


def _status(steps: Sequence[Threshold], value: float) -> Color:
    color = STATUS["neutral"]
    for step in steps:
        if step.value is None or value >= step.value:
            color = STATUS[step.color]
    return color


def _bars(panel: Panel, source: PanelSource) -> Markup:
    finite = [curve for curve in curves_of(panel, source.now) if math.isfinite(curve.last)]
    if not finite:
        return _NOTHING
    shown = sorted(finite, key=lambda curve: -curve.last)[:_MOST_BARS]
    largest = shown[0].last or 1
    parts = []
    for curve in shown:
        fill = paint(_status(panel.thresholds, curve.last) if panel.thresholds else curve.color)
        share = max(0.6, curve.last / largest * 100)
        bar = element("i", style=f"width:{share:.1f}%;background:{fill}")
        parts += [
            element("div", _words(curve.name)),
            element("div", bar, class_="bar"),
            element("b", format_value(curve.last, panel.unit)),
        ]
    return element("div", *parts, class_="bars")


def _table(panel: Panel, source: PanelSource) -> Markup:
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for column, query in panel.queries.items():
        for one in sorted(
            source.now(query), key=lambda series: series.labels.get(panel.text_label, "")
        ):
            job = one.labels.get("namespace", ""), one.labels.get("kdist_job", "")
            cells = rows.setdefault(job, {})
            if column.lower() == panel.text_label:
                word = one.labels.get(panel.text_label, "")
                cells[column] = f"{cells[column]}, {word}" if column in cells else word
            else:
                cells[column] = _cell(panel, column, one.last)
    if not rows:
        return _NOTHING
    lines = [
        [
            join(job, element("small", f" {namespace}")),
            *(cells.get(column, "-") for column in panel.queries),
        ]
        for (namespace, job), cells in sorted(rows.items())
    ]
    return element("div", table(["Training", *panel.queries], lines), class_="table")


def _cell(panel: Panel, column: str, value: float) -> str:
    text = format_value(value, (panel.units or {}).get(column, panel.unit))
    steps = (panel.column_thresholds or {}).get(column, ())
    if not steps:
        return text
    return element("span", text, style=f"color:{paint(_status(steps, value))}")

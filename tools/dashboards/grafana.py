"""A dashboard as Grafana's classic JSON, which its import, its provisioning and the sidecar of its
chart accept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdist.report.page import STATUS
from kdist_trainer.formats.json_text import encode_json
from tools.dashboards.model import (
    NAMED,
    Annotation,
    Dashboard,
    Kind,
    Panel,
    PanelRow,
    Variable,
)

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA = 39


def to_json(dashboard: Dashboard) -> str:
    """The dashboard's file, ending in a newline."""
    return encode_json(to_document(dashboard), indent=2, ensure_ascii=False) + "\n"


def to_document(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as plain values."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["kdist"],
        "schemaVersion": _SCHEMA,
        "editable": False,
        "graphTooltip": 1,
        "refresh": dashboard.refresh,
        "time": {"from": f"now-{dashboard.hours}h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_annotation(dashboard, mark) for mark in dashboard.annotations]},
        "templating": {"list": [_datasource(), *(_variable(each) for each in dashboard.variables)]},
        "panels": list(_panels(dashboard)),
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.name})"
    choices = {
        "includeAll": True,
        "allValue": variable.all_value,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"{variable.name}-values"},
        "multi": variable.multi,
        **(choices if variable.multi else {"includeAll": False}),
        "refresh": 2,
        "sort": 1,
        "hide": 0,
    }


def _annotation(dashboard: Dashboard, mark: Annotation) -> dict[str, Any]:
    return {
        "name": mark.title,
        "datasource": _SOURCE,
        "enable": True,
        "expr": f"{dashboard.query(mark.query)} > 0",
        "iconColor": STATUS[mark.color][0],
        "titleFormat": mark.title,
        "useValueForTime": False,
    }


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row in dashboard.rows:
        number += 1
        header = {"id": number, "type": "row", "title": row.title, "collapsed": row.collapsed}
        header["gridPos"] = {"h": 1, "w": 24, "x": 0, "y": top}
        top += 1
        panels = []
        for panel, (x, y) in zip(row.panels, positions(row), strict=True):
            number += 1
            area = {"h": panel.height, "w": panel.width, "x": x, "y": top + y}
            panels.append({"id": number, "gridPos": area, **_panel(dashboard, panel)})
        top += max(
            (each["gridPos"]["y"] + each["gridPos"]["h"] - top for each in panels), default=0
        )
        yield {**header, "panels": panels if row.collapsed else []}
        if not row.collapsed:
            yield from panels


def positions(row: PanelRow) -> list[tuple[int, int]]:
    """The position of each panel of a row: its column, and its line below the row's head. Each
    panel takes the highest free position.
    """
    heights = [0] * 24
    found = []
    for panel in row.panels:
        columns = range(24 - panel.width + 1)
        x = min(columns, key=lambda left: (max(heights[left : left + panel.width]), left))
        y = max(heights[x : x + panel.width])
        heights[x : x + panel.width] = [y + panel.height] * panel.width
        found.append((x, y))
    return found


def _panel(dashboard: Dashboard, panel: Panel) -> dict[str, Any]:
    return {
        "type": str(panel.kind),
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "targets": [
            _target(dashboard, panel, legend, text, index)
            for index, (legend, text) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {
            "defaults": _defaults(panel),
            "overrides": [*_named_colors(panel), *_column_units(panel)],
        },
        "options": _options(panel),
        **({"transformations": _one_line_each(panel)} if panel.kind is Kind.TABLE else {}),
    }


def _target(
    dashboard: Dashboard, panel: Panel, legend: str, text: str, index: int
) -> dict[str, Any]:
    instant = panel.instant
    return {
        "refId": legend if panel.kind is Kind.TABLE else chr(ord("A") + index),
        "datasource": _SOURCE,
        "expr": dashboard.query(text),
        "legendFormat": "{{state}}" if panel.shows_name else legend,
        "instant": instant,
        "range": not instant,
        **({"format": "table"} if panel.kind is Kind.TABLE else {}),
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    limits = {"min": panel.minimum, "max": panel.maximum, "decimals": panel.decimals}
    found: dict[str, Any] = {
        "unit": panel.unit,
        **{key: value for key, value in limits.items() if value is not None},
    }
    if panel.kind is Kind.LINES:
        found["color"] = {"mode": "palette-classic"}
        found["custom"] = {
            "drawStyle": "line",
            "lineWidth": 2,
            "fillOpacity": 70 if panel.stacked else 8,
            "showPoints": "always" if panel.spans_gaps else "never",
            "spanNulls": panel.spans_gaps,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10}
            if panel.logarithmic
            else {"type": "linear"},
        }
    else:
        found["color"] = {"mode": "thresholds"}
        known = panel.thresholds or ()
        steps = [{"color": STATUS[step.color][0], "value": step.value} for step in known]
        found["thresholds"] = {
            "mode": "absolute",
            "steps": steps or [{"color": STATUS["neutral"][0], "value": None}],
        }
    return found


def _options(panel: Panel) -> dict[str, Any]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind is Kind.STAT:
        mode = "name" if panel.shows_name else "value"
        return {
            "reduceOptions": reduce,
            "textMode": mode,
            "colorMode": "value",
            "graphMode": "none" if panel.shows_name else "area",
        }
    if panel.kind is Kind.BARS:
        return {
            "reduceOptions": reduce,
            "orientation": "horizontal",
            "displayMode": "basic",
            "showUnfilled": True,
        }
    if panel.kind is Kind.TABLE:
        return {"showHeader": True, "cellHeight": "sm"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _named_colors(panel: Panel) -> Iterator[dict[str, Any]]:
    if panel.kind is not Kind.LINES:
        return
    known = {
        name
        for legend in panel.queries
        for name in (NAMED if legend in ("{{phase}}", "{{category}}") else [legend])
    }
    for name, (light, _) in NAMED.items():
        if name in known:
            fixed = {"id": "color", "value": {"mode": "fixed", "fixedColor": light}}
            yield {"matcher": {"id": "byName", "options": name}, "properties": [fixed]}


def _column_units(panel: Panel) -> Iterator[dict[str, Any]]:
    units, steps = panel.units or {}, panel.column_thresholds or {}
    for name in dict.fromkeys([*units, *steps]):
        found: list[dict[str, Any]] = (
            [{"id": "unit", "value": units[name]}] if name in units else []
        )
        if name in steps:
            shown = [{"color": STATUS[step.color][0], "value": step.value} for step in steps[name]]
            found += [
                {"id": "thresholds", "value": {"mode": "absolute", "steps": shown}},
                {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            ]
        yield {"matcher": {"id": "byName", "options": f"Value #{name}"}, "properties": found}


def _one_line_each(panel: Panel) -> list[dict[str, Any]]:
    hidden = {
        "Time": True,
        **({f"Value #{panel.text_label.title()}": True} if panel.text_label else {}),
    }
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hidden}},
    ]

"""The rules of Grafana's dashboard-linter that apply to Prometheus dashboards, in Python; each
yields what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]

UNITS = {"none", "s", "percentunit", "bytes", "Bps", "cps", "flops"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_RATES = re.compile(r"\b(?:rate|irate|increase|changes)\([^()]*?\[([^\]]*)\]\)")


def panels(dashboard: Document) -> Iterator[Document]:
    """All panels with something in them, those of collapsed rows too."""
    for panel in dashboard["panels"]:
        inner = panel.get("panels", [])
        yield from inner if panel["type"] == "row" else [panel]


def targets(dashboard: Document) -> Iterator[tuple[Document, str]]:
    """Every query with its panel."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel, target["expr"]


def data_source_is_a_variable(dashboard: Document) -> Iterator[str]:
    """template-datasource, panel-datasource: one variable, and nothing else anywhere."""
    first = dashboard["templating"]["list"][0]
    if (first["name"], first["label"], first["type"], first["query"]) != (
        "datasource",
        "Data source",
        "datasource",
        "prometheus",
    ):
        yield "the first variable is not the data source"
    for uid in re.findall(
        r"'uid': '([^']*)'",
        repr([*panels(dashboard), dashboard["templating"], dashboard["annotations"]]),
    ):
        if uid != "${datasource}":
            yield f"a data source is fixed: {uid}"


def job_and_instance_can_be_chosen(dashboard: Document) -> Iterator[str]:
    """template-job, template-instance: named and labelled so, several at once, `.+` for all."""
    known = {each["name"]: each for each in dashboard["templating"]["list"]}
    for name in ("job", "instance"):
        each = known.get(name, {})
        if (each.get("label"), each.get("multi"), each.get("allValue")) != (
            name.title(),
            True,
            ".+",
        ):
            yield f"variable {name} is wrong"


def variables_follow_the_time_range(dashboard: Document) -> Iterator[str]:
    """template-on-time-change-reload."""
    for each in dashboard["templating"]["list"]:
        if each["type"] == "query" and each["refresh"] != 2:
            yield f"{each['name']} is not queried again"


def panels_are_named_and_described(dashboard: Document) -> Iterator[str]:
    """panel-title-description, panel-no-targets."""
    for panel in panels(dashboard):
        if not (panel["title"] and panel["description"] and panel["targets"]):
            yield f"{panel['title']!r} lacks a title, a description or a query"


def units_are_given(dashboard: Document) -> Iterator[str]:
    """panel-units, and only ones that Grafana knows."""
    for panel in panels(dashboard):
        config = panel["fieldConfig"]
        fixed = [
            each["value"]
            for over in config["overrides"]
            for each in over["properties"]
            if each["id"] == "unit"
        ]
        for unit in [config["defaults"].get("unit"), *fixed]:
            if unit not in UNITS:
                yield f"{panel['title']}: unit {unit!r}"


def legends_distinguish_series(dashboard: Document) -> Iterator[str]:
    """A query that gives several series names the labels in its legend; two of one panel have
    different ones.
    """
    for panel in panels(dashboard):
        legends = [target["legendFormat"] for target in panel["targets"]]
        if len(set(legends)) != len(legends):
            yield f"{panel['title']}: two queries have the same legend"
        for target in panel["targets"]:
            grouped = re.match(
                r"(?:\w+\(\d+, |sort_desc\()?(?:sum|max|min|avg) by \(([^)]*)\)", target["expr"]
            )
            labels = set(grouped[1].split(", ")) - {"namespace", "le"} if grouped else set()
            if panel["type"] != "table" and any(
                f"{{{{{label}}}}}" not in target["legendFormat"] for label in labels
            ):
                yield f"{panel['title']}: {target['legendFormat']!r} does not name {sorted(labels)}"


def rates_take_the_interval(dashboard: Document) -> Iterator[str]:
    """target-rate-interval; sums over the whole shown time take `$__range`."""
    for panel, expr in targets(dashboard):
        for window in _RATES.findall(expr):
            if window not in ("$__rate_interval", "$__range"):
                yield f"{panel['title']}: window {window}"


def selectors_use_the_variables(dashboard: Document) -> Iterator[str]:
    """target-job, target-instance: for metrics of kdist and of Prometheus itself."""
    for panel, expr in targets(dashboard):
        if re.search(
            r"\bkdist_\w+\b(?!\{)(?![\w,)])", re.sub(r"\bkdist_(job|namespace)\b", "", expr)
        ):
            yield f"{panel['title']}: a selector without labels in {expr}"
        for metric, labels in _SELECTOR.findall(expr):
            controller = metric.startswith("kdist_controller_")
            if controller and 'kdist_namespace=~"$namespace"' not in labels:
                yield f"{panel['title']}: {metric} is taken from everywhere"
            ours = (metric.startswith("kdist_") and not controller) or metric in (
                "up",
                "scrape_samples_scraped",
            )
            if ours and not ('job=~"$job"' in labels and 'instance=~"$instance"' in labels):
                yield f"{panel['title']}: {metric} is taken from everywhere"


COUNTED_FROM_ONE = {
    "kdist_worker_group_restarts_total": "a cause is counted from 1 on, so its first "
    "rise has no rate",
    "kdist_worker_exits_total": "the same",
    "kdist_checkpoint_attempts_total": "its panel shows how many there were",
    "kdist_checkpoint_failures_total": "a cause is counted from 1 on, so its first "
    "rise has no rate",
    "kdist_checkpoint_fallbacks_total": "the same",
    "kdist_lost_progress_seconds_total": "its panel shows how much there was",
    "kdist_lost_steps_total": "its panel shows how much there was",
}


def counters_have_rates(dashboard: Document) -> Iterator[str]:
    """target-counter-agg, but for counters whose count itself is shown, and why."""
    for panel, expr in targets(dashboard):
        for found in re.finditer(r"(\w*)\(?\s*(kdist_\w+_total)\{", expr):
            if found[2] not in COUNTED_FROM_ONE and found[1] not in ("rate", "increase"):
                yield f"{panel['title']}: {found[2]} without a rate"


def nobody_edits_it(dashboard: Document) -> Iterator[str]:
    """uneditable-dashboard."""
    if dashboard["editable"]:
        yield "it can be edited, and the next upgrade would take that back"


RULES = [
    rule
    for name, rule in list(globals().items())
    if getattr(rule, "__annotations__", {}).get("return") == "Iterator[str]"
]

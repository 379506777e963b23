"""What the rules share with templates, pages and code, which no Prometheus is needed to compare."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, get_args

import yaml

from kdist_trainer.config import Cause, Training
from kdist_trainer.metrics.exporter import CATALOGUE, SCRIPT
from kdist_trainer.network.server import Refused
from tests.charts.rules import CHART, CONTROLLER, FILES, alerts
from tests.docs.blocks import DOCS
from tests.docs.test_facts_in_prose import WORDS
from tools.dashboards import DASHBOARDS, goodput

PAGE: Final = (DOCS / "how-to/monitoring.md").read_text()
TEMPLATES: Final = {path.name: path.read_text() for path in (CHART / "templates").glob("*.yaml")}


def of_page() -> list[dict[str, Any]]:
    """The configurations of a Prometheus on the page."""
    found = [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    return [each for each in found if "scrape_configs" in each]


def test_the_page_loads_each_rule_file_with_the_job_that_its_rules_select() -> None:
    loaded: dict[str, set[str]] = {}
    for document in of_page():
        jobs = {each["job_name"] for each in document["scrape_configs"]}
        loaded |= dict.fromkeys(document["rule_files"], jobs)
    files = {f"charts/kdist/rules/{path.name}": path.read_text() for path in (*FILES, CONTROLLER)}
    assert loaded.keys() == files.keys()
    selected = {name: {*re.findall(r'\bjob="([\w-]+)"', text)} for name, text in files.items()}
    assert {name for name, jobs in selected.items() if not jobs <= loaded[name]} == set()
    named = {
        each for text in TEMPLATES.values() for each in re.findall(r"replacement: (\S+)", text)
    }
    assert named == {job for jobs in loaded.values() for job in jobs}
    assert named == {job for jobs in selected.values() for job in jobs}


def test_every_rule_file_and_every_dashboard_is_in_the_chart_and_tried() -> None:
    assert {*(CHART / "rules").iterdir()} == {*FILES, CONTROLLER}
    installed = re.findall(r'"(rules/[\w-]+\.yaml)"', TEMPLATES["prometheusrule.yaml"])
    assert {CHART / each for each in installed} == {*FILES, CONTROLLER}
    assert {path.name for path in (CHART / "dashboards").iterdir()} == {
        f"{name}.json" for name in DASHBOARDS
    }
    for page, words in (("README.md", "Grafana dashboards"), ("Chart.yaml", "dashboards")):
        assert f" {WORDS[len(DASHBOARDS)]} {words}" in (CHART / page).read_text(), page


def test_pages_say_when_alerts_resolve_as_their_windows_do() -> None:
    conditions = {name: rule["expr"] for name, rule in alerts().items()}
    runbooks = (DOCS / "reference/runbooks.md").read_text()
    assert "resolves an hour after the failure" in runbooks
    assert {*re.findall(r"\[(\w+):\w+\]", conditions["KdistJobFailed"])} == {"1h"}
    assert re.search(r"\| KdistLossNotFinite \|[^|]*\| ten minutes have passed \|", PAGE)
    assert re.findall(r"\[(\w+)\]", conditions["KdistLossNotFinite"]) == ["10m"]


def test_the_page_says_over_what_time_goodput_is_and_what_is_left_out() -> None:
    assert {*re.findall(r"\[(.*?)\]", goodput.OF_TRAINING)} == {"$__range"}
    assert "wall time in the selected time range that was spent in steps" in PAGE
    left_out = "that were not repeated, without waiting for data"
    assert ("kdist_lost_progress_seconds_total" in goodput.OF_TRAINING) is (left_out in PAGE)
    panels = {panel.title: panel for panel in DASHBOARDS["training-job"].panels}
    assert [*panels["Goodput"].queries.values()] == [goodput.OF_TRAINING]


def test_the_runbook_explains_every_cause_that_a_save_can_fail_for() -> None:
    runbooks = (DOCS / "reference/runbooks.md").read_text()
    section = runbooks.partition("## KdistCheckpointFailing\n")[2].partition("\n## ")[0]
    (metric,) = [each for each in CATALOGUE if each.name == "kdist_checkpoint_failures_total"]
    causes = {cause for op, cause in metric.series if op == "save"}
    assert {*re.findall(r"`([a-z]+)`", section)} - {"cause"} == causes


def test_the_page_labels_series_as_the_pod_monitor_does() -> None:
    template = TEMPLATES["podmonitor.yaml"]
    (source,) = re.findall(r"sourceLabels: \[(\S+)\]\n +targetLabel: kdist_job\n", template)
    (dropped,) = re.findall(r"action: labeldrop\n +regex: (\S+)", template)
    (scrape,) = of_page()[0]["scrape_configs"]
    assert {"source_labels": [source], "target_label": "kdist_job"} in scrape["relabel_configs"]
    assert scrape["metric_relabel_configs"] == [{"regex": dropped, "action": "labeldrop"}]


def test_rows_and_panels_that_pages_and_alerts_name_are_those_of_the_dashboards() -> None:
    rows = {row.title for row in DASHBOARDS["training-job"].rows}
    panels = {panel.title for panel in DASHBOARDS["training-job"].panels}
    runbooks = (DOCS / "reference/runbooks.md").read_text()
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]*)\*(?!\*)", runbooks))
    assert len(named) > 5
    assert named <= rows | panels
    table = PAGE.partition("| question | row of *Training job* |\n|---|---|\n")[2]
    told = re.findall(r"^\|[^|]*\| ([^:|]+):", table.partition("\n\n")[0], re.MULTILINE)
    assert len(told) > 5
    assert set(told) <= rows
    text = " ".join(path.read_text() for path in FILES)
    of_alerts = re.findall(r"The row (\w+) of the dashboard", text)
    assert of_alerts
    assert set(of_alerts) <= rows


MATCHER: Final = re.compile(r'(\w+)\s*(?:=~|!=|!~|=)\s*"([^"$]*)"')
OF_SCRAPES: Final = {"job", "pod", "namespace", "kdist_namespace", "kdist_job", "container"}
KNOWN: Final = {
    "cause": {*Cause},
    "framework": {*get_args(Training.model_fields["strategy"].annotation), SCRIPT},
    "reason": {*Refused},
}
"""Values of labels whose series are known at run time only."""


def selected() -> Iterator[tuple[str, str, str]]:
    """What rules and panels select: a metric, a label, and one of its values."""
    rules = [path.read_text() for path in (*FILES, CONTROLLER)]
    queries = [
        query
        for dashboard in DASHBOARDS.values()
        for panel in dashboard.panels
        for query in panel.queries.values()
    ]
    for text in (*rules, *queries):
        for metric, labels in re.findall(r"\b(kdist_\w+)\{([^}]*)\}", text):
            for label, values in MATCHER.findall(labels):
                yield from ((metric, label, value) for value in values.split("|") if value)


def test_every_value_of_a_label_that_rules_and_panels_select_is_one_that_the_metric_has() -> None:
    catalogue = {metric.name: metric for metric in CATALOGUE}
    found = {each for each in selected() if each[1] not in OF_SCRAPES}
    assert {label for _, label, _ in found} >= {"state", "phase", "category", "op", "kind", *KNOWN}
    wrong = set()
    for name, label, value in found:
        metric = catalogue.get(re.sub(r"_(?:sum|count|bucket)$", "", name))
        known = KNOWN.get(label, set())
        if metric is not None and metric.series:
            known = {values[metric.labels.index(label)] for values in metric.series}
        wrong |= {(name, label, value)} - {(name, label, each) for each in known}
    assert wrong == set()

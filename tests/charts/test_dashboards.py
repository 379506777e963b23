"""The dashboards keep the linter's rules, the committed ones are fresh, and they show every metric
that there is to show.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.metrics.exporter import CATALOGUE
from kdist_trainer.metrics.metric import Kind
from tests.charts import lint
from tests.charts.rules import CHART, read_rules
from tools.dashboards import DASHBOARDS
from tools.dashboards.grafana import positions, to_document, to_json

Rule = Callable[[dict[str, Any]], Iterator[str]]
DETAIL = {
    "kdist_compile_seconds_total": "of the first steps alone; for a comparison of two starts",
    "kdist_build_info": "versions; for a table of one's own",
    "kdist_tokens_total": "samples are shown, which every workload has",
}


def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    document = copy.deepcopy(to_document(DASHBOARDS["training-job"]))
    change(document)
    return document


def set_expr(text: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        next(lint.panels(document))["targets"][0]["expr"] = text

    return change


def set_panel(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: next(lint.panels(document)).update(fields)


def set_variable(index: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["templating"]["list"][index].update(fields)


BROKEN: dict[Rule, Callable[[dict[str, Any]], None]] = {
    lint.data_source_is_a_variable: set_panel(
        datasource={"type": "prometheus", "uid": "P1809F7CD0C75ACF3"}
    ),
    lint.job_and_instance_can_be_chosen: set_variable(-1, allValue=None),
    lint.variables_follow_the_time_range: set_variable(-1, refresh=1),
    lint.panels_are_named_and_described: set_panel(description=""),
    lint.units_are_given: set_panel(fieldConfig={"defaults": {"unit": "seconds"}, "overrides": []}),
    lint.legends_distinguish_series: set_expr(
        'sum by (rank) (rate(kdist_steps_total{job=~"$job"}[$__rate_interval]))'
    ),
    lint.rates_take_the_interval: set_expr(
        'rate(kdist_steps_total{job=~"$job", instance=~"$instance"}[5m])'
    ),
    lint.selectors_use_the_variables: set_expr("max(kdist_loss{})"),
    lint.counters_have_rates: set_expr(
        'sum(kdist_steps_total{job=~"$job", instance=~"$instance"})'
    ),
    lint.nobody_edits_it: lambda document: document.update(editable=True),
}


@pytest.mark.parametrize("name", DASHBOARDS)
@pytest.mark.parametrize("rule", lint.RULES, ids=lambda rule: rule.__name__)
def test_a_dashboard_keeps_the_rule(name: str, rule: Rule) -> None:
    assert list(rule(to_document(DASHBOARDS[name]))) == []


@pytest.mark.parametrize("rule", lint.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_notices_a_dashboard_that_breaks_it(rule: Rule) -> None:
    assert list(rule(broken(BROKEN[rule]))) != []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_chart_carries_the_dashboard_of_the_code(name: str) -> None:
    kept = CHART / "dashboards" / f"{name}.json"
    assert kept.read_text() == to_json(DASHBOARDS[name]), "run: make generate"
    assert len(kept.read_bytes()) < 2**20 - 4096, "it has to fit a ConfigMap"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fill_their_rows_without_overlapping(name: str) -> None:
    for row in DASHBOARDS[name].rows:
        taken: set[tuple[int, int]] = set()
        for panel, (x, y) in zip(row.panels, positions(row), strict=True):
            cells = {(x + i, y + j) for i in range(panel.width) for j in range(panel.height)}
            assert not cells & taken, panel.title
            taken |= cells
        assert max(x for x, _ in taken) == 23
        assert len(taken) == 24 * (max(y for _, y in taken) + 1), f"{row.title} has a gap"
    numbers = [panel["id"] for panel in lint.panels(to_document(DASHBOARDS[name]))]
    assert len(set(numbers)) == len(numbers)


def test_every_metric_is_shown_or_is_a_detail() -> None:
    exprs = [
        expr
        for dashboard in DASHBOARDS.values()
        for _, expr in lint.targets(to_document(dashboard))
    ]
    text = " ".join([*exprs, *(rule["expr"] for rule in read_rules())])
    # the controller's are checked with its alerts
    used = set(re.findall(r"(?<!:)\bkdist_(?!controller_)\w+", text))
    used -= {"kdist_job", "kdist_namespace"}
    names = {metric.name: {metric.name} for metric in CATALOGUE}
    names |= {
        m.name: {f"{m.name}_{end}" for end in ("bucket", "sum", "count")}
        for m in CATALOGUE
        if m.kind is Kind.HISTOGRAM
    }
    unseen = {name for name, known in names.items() if not known & used}
    assert unseen == set(DETAIL), (
        "a metric needs a panel in tools/dashboards, or a reason in DETAIL; then: make generate"
    )
    assert used - {each for known in names.values() for each in known} == set(), "no such metric"


def test_alerts_link_to_a_dashboard_that_exists() -> None:
    uids = {dashboard.uid for dashboard in DASHBOARDS.values()}
    for rule in read_rules():
        if "alert" in rule:
            assert rule["annotations"]["dashboard"].split("?")[0].removeprefix("/d/") in uids


def test_a_dashboard_is_printed_as_grafana_reads_it(kdist: Any) -> None:
    for name, dashboard in DASHBOARDS.items():
        done = kdist("dashboards", "export", name)
        assert json.loads(done.stdout) == to_document(dashboard)


def test_all_dashboards_are_written_as_the_chart_has_them(kdist: Any, tmp_path: Path) -> None:
    assert kdist("dashboards", "export", "--out", str(tmp_path)).exit_code == 0
    kept = {path.name: path.read_text() for path in (CHART / "dashboards").iterdir()}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == kept


def test_an_unknown_dashboard_is_rejected_with_the_known_names(kdist: Any) -> None:
    done = kdist("dashboards", "export", "nonsense")
    assert done.exit_code == 2
    assert "training-job, fleet" in done.stderr

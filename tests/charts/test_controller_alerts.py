"""The alerts about the controller fire when nobody leads and when changes keep failing, and not
when a replica changes places with another.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist_controller.metrics import Metrics
from tests.charts.rules import CONTROLLER, controller_alerts

SERIES = 'kdist_controller_leader{{job="kdist-controller",namespace="ml",pod="{}"}}'
FAILING = 'kdist_controller_failing_jobs{job="kdist-controller",namespace="ml",pod="a"}'

REFUSED = (
    "kdist_controller_connections_refused_total"
    '{{job="kdist-controller",namespace="ml",pod="a",reason="{}"}}'
)


@pytest.fixture(autouse=True)
def promtool(program: Callable[[str], str]) -> str:
    return program("promtool")


def run(folder: Path, series: dict[str, str], fires: dict[str, str]) -> str:
    """What promtool complains of if, of these series, an alert fires at other times than these."""
    shutil.copy(CONTROLLER, folder)
    tried: dict[str, Any] = {
        "interval": "30s",
        "input_series": [{"series": key, "values": each} for key, each in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": 1}] if name in expected.split() else [],
            }
            for at, expected in fires.items()
            for name in controller_alerts()
        ],
    }
    document = {"rule_files": [CONTROLLER.name], "evaluation_interval": "1m", "tests": [tried]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document, width=10_000))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_a_change_of_the_leader_is_no_alert_and_a_lack_of_one_is(tmp_path: Path) -> None:
    series = {SERIES.format("a"): "1x20 0x100", SERIES.format("b"): "0x24 1x26 stale"}
    fires = {"9m": "", "12m": "", "20m": "", "28m": "", "35m": "KdistControllerDown"}
    assert run(tmp_path, series, fires) == ""


def test_a_controller_that_is_gone_altogether_is_noticed(tmp_path: Path) -> None:
    series = {SERIES.format("a"): "1x20 stale", SERIES.format("b"): "0x20 stale"}
    fires = {"9m": "", "12m": "", "18m": "KdistControllerDown"}
    assert run(tmp_path, series, fires) == ""


def test_one_job_that_keeps_failing_is_noticed_and_a_few_failures_are_not(tmp_path: Path) -> None:
    leads = {SERIES.format("a"): "1x200"}
    name = "KdistControllerFailing"
    failing = {"20m": "", "33m": "", "38m": name, "45m": name, "95m": ""}
    assert run(tmp_path, {**leads, FAILING: "0x40 1x80 0x100"}, failing) == ""
    assert run(tmp_path, {**leads, FAILING: "0x40 1x20 0x6 1x60 0x100"}, failing) == "", "led again"
    quiet = dict.fromkeys(("25m", "28m", "32m", "45m"), "")
    assert run(tmp_path, {**leads, FAILING: "0x40 3x16 0x140"}, quiet) == ""


def test_many_refused_connections_are_noticed_and_slow_clients_are_not(tmp_path: Path) -> None:
    leads = {SERIES.format("a"): "1x200"}
    refusing = {"20m": "", "35m": "KdistControllerConnectionsRefused", "95m": ""}
    assert run(tmp_path, {**leads, REFUSED.format("limit"): "0x40 0+20x40 800x120"}, refusing) == ""
    slow = {**leads, REFUSED.format("timeout"): "0x40 0+20x40 800x120"}
    assert run(tmp_path, slow, dict.fromkeys(refusing, "")) == ""


def test_a_node_is_named_as_long_as_a_job_avoids_it(tmp_path: Path) -> None:
    leads = {SERIES.format("a"): "1x200"}
    avoids = 'kdist_controller_node_avoided{job="kdist-controller",kdist_namespace="ml",node="n"}'
    series = {**leads, avoids: "_x20 1x40 stale"}
    assert run(tmp_path, series, {"9m": "", "15m": "KdistNodeAvoided", "40m": ""}) == ""


def test_alerts_of_the_controller_use_its_metrics_and_have_a_severity() -> None:
    metrics = Metrics(lambda: (), lambda: 0, lambda: 0, lambda: [("ml", "digits", "worker-2")])
    metrics.show_refused(lambda: {"limit": 0})
    exported = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    for rule in controller_alerts().values():
        assert set(re.findall(r"kdist_controller_\w+", rule["expr"])) <= exported
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}

"""Every alert fires on what it is for, stays silent on what is well, resolves, and is explained."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kdist import backends
from kdist.agents.metrics import STRAGGLER_RATIO
from kdist_trainer.metrics.exporter import CATALOGUE
from kdist_trainer.metrics.metric import Kind
from tests.charts.rules import (
    FILES,
    SCENARIOS,
    alerts,
    controller_alerts,
    promtool_test,
    read_rules,
    run_promtool,
)
from tests.house.tree import ROOT

RUNBOOKS = ROOT / "docs" / "reference" / "runbooks.md"
FOREIGN = {"up", "kube_pod_container_status_running"}


@pytest.fixture(autouse=True)
def promtool(program: Callable[[str], str]) -> str:
    return program("promtool")


def test_promtool_finds_nothing_wrong_with_the_rule_files() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", *FILES],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_alert_fires_on_the_sick_job_alone_and_resolves(tmp_path: Path) -> None:
    done = run_promtool(tmp_path, *[promtool_test(name) for name in alerts()])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.sampled
def test_every_scenario_would_notice_an_alert_that_never_fires(tmp_path: Path) -> None:
    tried = [promtool_test(name) for name in alerts()]
    for one in tried:
        one["input_series"] = [
            series for series in one["input_series"] if 'kdist_job="sick"' not in series["series"]
        ]
        one["alert_rule_test"] = [each for each in one["alert_rule_test"] if each["exp_alerts"]]
    done = run_promtool(tmp_path, *tried)
    assert set(re.findall(r"alertname: (\w+), time", done.stdout + done.stderr)) == set(alerts())


def test_dead_exporters_fire_their_alert_and_no_other(tmp_path: Path) -> None:
    dead = 'up{job="kdist",namespace="ml",kdist_job="digits",pod="p-0",instance="10.0.0.1:9401"}'
    silent = [
        {"eval_time": "20m", "alertname": name, "exp_alerts": []}
        for name in alerts()
        if name != "KdistExporterDown"
    ]
    tried = {
        "interval": "30s",
        "input_series": [{"series": dead, "values": "0x60"}],
        "alert_rule_test": silent,
    }
    assert run_promtool(tmp_path, tried).returncode == 0
    tried["alert_rule_test"] = [
        {"eval_time": "20m", "alertname": "KdistExporterDown", "exp_alerts": []}
    ]
    assert run_promtool(tmp_path, tried).returncode != 0


NUMBERS = {
    "two": 2,
    "three": 3,
    "five": 5,
    "six": 6,
    "ten": 10,
    "thirty": 30,
    "half an hour": 30,
    "half of": 0.5,
    "hundred": 100,
}


SPOKEN = {**NUMBERS, "four": 4, "seven": 7, "eight": 8, "nine": 9, "twenty": 20, "forty": 40}
OF_THE_CODE = {"KdistNodeAvoided"}
"""Whose numbers are the controller's: tests/docs/test_facts_in_prose.py compares them."""


WINDOW: Final = re.compile(r"\[\d+[smhd]|\boffset \d+[smhd]")
LAST: Final = re.compile(r"(?i)\b(?:in|within|last) (?:half an|\w+) (?:minute|hour|day)s?\b")


def pair(alert: Mapping[str, Any], words: str) -> Iterator[tuple[set[float], str]]:
    """Numbers and the words that repeat them: of the windows, and of the rest of the condition."""
    condition = f"{alert['expr']} {alert.get('for', '')}"
    for numbers, told in (
        (" ".join(WINDOW.findall(condition)), " ".join(LAST.findall(words))),
        (WINDOW.sub("", condition), LAST.sub("", words)),
    ):
        yield {float(each) for each in re.findall(r"\b\d+(?:\.\d+)?", numbers)}, told


def test_numbers_in_the_words_of_an_alert_are_those_of_its_condition() -> None:
    seen = set()
    for name, alert in {**alerts(), **controller_alerts()}.items():
        text = f"{alert['annotations']['description']} {alert['annotations']['summary']}"
        for numbers, words in pair(alert, re.sub(r"\{\{.*?\}\}", "", text)):
            told = {float(each) for each in re.findall(r"\d+(?:\.\d+)?", words)}
            said = {each for each in NUMBERS if re.search(rf"\b{each}\b", words)}
            assert told | {NUMBERS[each] for each in said} <= numbers, name
            seen |= said
    assert seen == NUMBERS.keys()


def test_numbers_in_what_a_runbook_says_of_an_alert_are_those_of_its_condition() -> None:
    text = RUNBOOKS.read_text()
    seen = 0
    for name, alert in {**alerts(), **controller_alerts()}.items():
        meaning = text.partition(f"## {name}\n")[2].partition("**What it means.** ")[2]
        meaning = re.sub(r"(?:exit code|port) \d+", "", meaning.partition("\n")[0])
        for numbers, words in pair(alert, meaning):
            numbers |= {60 * each for each in numbers} | {each / 60 for each in numbers}
            for share in re.findall(r"(\d+) %", words):
                assert int(share) / 100 in numbers, name
            told = {float(each) for each in re.findall(r"\b\d+(?:\.\d+)?\b(?! %)", words)}
            told |= {SPOKEN[each] for each in SPOKEN if re.search(rf"\b{each}\b", words)}
            assert name in OF_THE_CODE or told <= numbers, (name, told - numbers)
            seen += len(told)
    assert seen > 15


def test_the_straggler_of_the_alert_is_the_slow_rank_of_kdist_top() -> None:
    assert (
        alerts()["KdistStraggler"]["expr"] == f"job:kdist_straggler_skew:ratio > {STRAGGLER_RATIO}"
    )
    assert f"busy {STRAGGLER_RATIO} times as long" in RUNBOOKS.read_text()


@pytest.mark.parametrize(
    "container", sorted({backends.get(name).container for name in backends.NAMES})
)
def test_a_running_pod_that_is_no_longer_scraped_fires_an_alert(
    tmp_path: Path, container: str
) -> None:
    pod = 'namespace="ml",kdist_job="digits",pod="p-0"'
    running = 'kube_pod_container_status_running{namespace="ml",pod="%s",container="%s"}'
    inputs = [
        {"series": f'up{{job="kdist",{pod}}}', "values": "1x10 stale"},
        {"series": f'kdist_job_state{{{pod},state="running"}}', "values": "1x10 stale"},
        {"series": running % ("p-0", container), "values": "1x60"},
        {"series": running % ("other-0", container), "values": "1x60"},
    ]
    expr = 'sum by (pod) (ALERTS{alertname="KdistExporterDown",alertstate="firing"})'
    sample = {"labels": '{pod="p-0"}', "value": 1}
    tried = {
        "interval": "30s",
        "input_series": inputs,
        "promql_expr_test": [
            {"expr": expr, "eval_time": "5m", "exp_samples": []},
            {"expr": expr, "eval_time": "15m", "exp_samples": [sample]},
        ],
    }
    done = run_promtool(tmp_path, tried)
    assert done.returncode == 0, done.stdout


def test_recording_rules_compute_what_their_names_promise(tmp_path: Path) -> None:
    job, other = 'namespace="a",kdist_job="x"', 'namespace="a",kdist_job="of hsdp"'
    script = 'namespace="a",kdist_job="of a script"'
    series = {
        f'kdist_wall_seconds_total{{{job},category="productive_step"}}': "0+45x120",
        f'kdist_wall_seconds_total{{{job},category="data_wait"}}': "0+15x120",
        f"kdist_lost_progress_seconds_total{{{job}}}": "0+15x120",
        f'kdist_collective_bytes_total{{{job},rank="0",op="all_reduce"}}': "0+1000000000x120",
        f'kdist_collective_seconds_total{{{job},rank="0",op="all_reduce"}}': "0+1x120",
        f"kdist_world_size{{{job}}}": "4x120",
        f'kdist_job_info{{{job},framework="ddp"}}': "1x120",
        f'kdist_collective_bytes_total{{{other},rank="0",op="all_reduce"}}': "0+1000000000x120",
        f'kdist_collective_seconds_total{{{other},rank="0",op="all_reduce"}}': "0+1x120",
        f"kdist_world_size{{{other}}}": "4x120",
        f'kdist_job_info{{{other},framework="hsdp"}}': "1x120",
        f'kdist_wall_seconds_total{{{script},category="productive_step"}}': "0x120",
        f'kdist_wall_seconds_total{{{script},category="startup"}}': "0+60x120",
        f'kdist_job_info{{{script},framework="script"}}': "1x120",
        f"kdist_step_duration_seconds_sum{{{job}}}": "0+30x120",
        f"kdist_step_duration_seconds_count{{{job}}}": "0+60x120",
    }
    wanted = {
        "round(job:kdist_goodput:ratio_rate1h, 0.001)": 0.5,
        "round(job:kdist_allreduce_bus_bandwidth:bytes_per_second_rate5m)": 1_500_000_000,
        "round(job:kdist_step_duration_seconds:mean5m, 0.001)": 0.5,
    }
    tried = {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": "100m",
                "exp_samples": [{"labels": f"{{{job}}}", "value": value}],
            }
            for expr, value in wanted.items()
        ],
    }
    done = run_promtool(tmp_path, tried)
    assert done.returncode == 0, done.stdout


def test_every_alert_is_tried_and_explained() -> None:
    assert set(SCENARIOS) == set(alerts())
    for name, rule in alerts().items():
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url", "dashboard"}, (
            name
        )
        assert rule["annotations"]["runbook_url"] == f"docs/reference/runbooks.md#{name.lower()}"
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    text = RUNBOOKS.read_text()
    expected = [*alerts(), *controller_alerts()]
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == expected
    for name, rule in controller_alerts().items():
        assert rule["annotations"]["runbook_url"] == f"docs/reference/runbooks.md#{name.lower()}"
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        for part in ("**What it means.**", "**What to do.**"):
            assert part in section, section.splitlines()[0]


def test_rules_use_only_metrics_that_exist() -> None:
    known = {metric.name for metric in CATALOGUE} | FOREIGN
    known |= {
        f"{metric.name}_{end}"
        for metric in CATALOGUE
        if metric.kind is Kind.HISTOGRAM
        for end in ("sum", "count", "bucket")
    }
    recorded = {rule["record"] for rule in read_rules() if "record" in rule}
    for rule in read_rules():
        expr = re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", rule["expr"])
        used = set(re.findall(r"\b(?:job:|rank:)?(?:kdist|kube)_\w+(?::\w+)?|\bup\b", expr)) - {
            "kdist_job"
        }
        assert used <= known | recorded, used - known - recorded

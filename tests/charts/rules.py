"""The rule files, and promtool tests of them made of `alerts.yaml`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.house.tree import ROOT

CHART = ROOT / "charts" / "kdist"
FILES = tuple(CHART / "rules" / name for name in ("alerts.yaml", "recording.yaml"))
"""The rules about jobs."""
CONTROLLER = CHART / "rules" / "controller.yaml"
"""The alerts about the controller, which have the labels of no job."""
SCENARIOS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "alerts.yaml").read_text()
)

_NAMESPACE = "ml"


def read_rules() -> list[dict[str, Any]]:
    """Every rule of every file, in order."""
    documents = [yaml.safe_load(path.read_text()) for path in FILES]
    return [
        rule for document in documents for group in document["groups"] for rule in group["rules"]
    ]


def hasten(folder: Path, divisor: int = 60) -> list[Path]:
    """Copies of the rule files in which alerts wait a fraction of their `for`; the expressions are
    what they were.
    """
    hastened = []
    for path in FILES:
        document = yaml.safe_load(path.read_text())
        shorten(document["groups"], divisor)
        hastened.append(folder / path.name)
        hastened[-1].write_text(yaml.safe_dump(document, width=10_000))
    return hastened


def shorten(groups: list[dict[str, Any]], divisor: int = 60) -> None:
    """Let alerts wait a fraction of their `for`."""
    for rule in (rule for group in groups for rule in group["rules"] if "for" in rule):
        rule["for"] = f"{int(rule['for'].removesuffix('m')) * 60 // divisor}s"


def alerts() -> dict[str, dict[str, Any]]:
    """Alerting rules by name."""
    return {rule["alert"]: rule for rule in read_rules() if "alert" in rule}


def controller_alerts() -> dict[str, dict[str, Any]]:
    """Alerting rules about the controller, by name."""
    groups = yaml.safe_load(CONTROLLER.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def promtool_test(name: str) -> dict[str, Any]:
    """What promtool is to try for the alert `name`, as the document it reads."""
    scenario = SCENARIOS[name]
    kinds = [kind for kind in ("sick", "well", "unknown") if kind in scenario]
    jobs: dict[str, dict[str, Any]] = {
        kind: {**scenario.get("steady", {}), **scenario[kind]} for kind in kinds
    }
    jobs["bare"] = {
        key: values
        for key, values in jobs["sick"].items()
        if key.partition("{")[0] not in scenario["lacks"]
    }
    series = [
        {"series": _labelled(key, job), "values": str(values)}
        for job, known in jobs.items()
        for key, values in known.items()
    ]
    fires = [_expected(name, scenario, "sick")]
    if scenario.get("bare_fires"):
        fires.append(_expected(name, scenario, "bare"))
    silent = {"eval_time": scenario["before"], "alertname": name, "exp_alerts": []}
    tried = [
        silent,
        {"eval_time": scenario["at"], "alertname": name, "exp_alerts": fires},
        {"eval_time": scenario["after"], "alertname": name, "exp_alerts": []},
    ]
    return {
        "interval": scenario.get("interval", "30s"),
        "name": name,
        "input_series": series,
        "alert_rule_test": tried,
    }


def run_promtool(folder: Path, *tests: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """`promtool test rules` on these tests."""
    for path in FILES:
        shutil.copy(path, folder)
    document = {
        "rule_files": [path.name for path in FILES],
        "evaluation_interval": "1m",
        "tests": list(tests),
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(document, width=10_000))
    command = ["promtool", "test", "rules", "tests.yaml"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def _labelled(key: str, job: str) -> str:
    name, _, labels = key.rstrip("}").partition("{")
    return f'{name}{{namespace="{_NAMESPACE}",kdist_job="{job}"{"," if labels else ""}{labels}}}'


def _expected(name: str, scenario: dict[str, Any], job: str) -> dict[str, Any]:
    words = {
        word: scenario.get(f"{job}_{word}", scenario[word].replace("sick", job))
        for word in ("summary", "description")
    }
    rule = alerts()[name]
    known = {"namespace": _NAMESPACE, "kdist_job": job}
    link = rule["annotations"]["dashboard"]
    for label, value in known.items():
        link = link.replace(f"{{{{ $labels.{label} }}}}", value)
    return {
        "exp_labels": {**known, **scenario.get("labels", {}), **rule["labels"]},
        "exp_annotations": {
            **words,
            "runbook_url": rule["annotations"]["runbook_url"],
            "dashboard": link,
        },
    }

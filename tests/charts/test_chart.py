"""What of the Helm chart can be read without Helm: its values, their descriptions, its page."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

from kdist.doctor import cluster_checks
from kdist_trainer.config import TrainConfig
from tests.charts.chart_page import PAGE, leaves, render
from tests.charts.rules import CHART
from tests.house.tree import ROOT, files

OLDEST = ".".join(map(str, cluster_checks.OLDEST))
VALUE: Final = re.compile(
    r"(?<![\w./-])(?:controller|monitoring|rbac|networkPolicy|quota|kueue|serviceAccount)"
    r"(?:\.(?!md\b|py\b|yaml\b)[A-Za-z]+)+(?![\w-])"
)
GROUPS: Final = ("kueue.x", "monitoring.coreos.com", "rbac.authorization")
"""What groups of APIs begin with."""


def test_chart_doctor_and_docs_name_one_oldest_kubernetes() -> None:
    printed = {
        name: re.findall(r"Kubernetes (1\.\d+)", (ROOT / name).read_text())
        for name in ("charts/kdist/README.md", "docs/how-to/kubernetes.md", "README.md")
    }
    assert {version for versions in printed.values() for version in versions} == {OLDEST}


def test_every_value_is_described_and_every_description_has_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(part: dict[str, Any], known: dict[str, Any], path: str) -> None:
        assert set(part["properties"]) == set(known), path
        # which holds what is the parent chart's too
        assert part["additionalProperties"] is (path == "global."), path
        for name, inner in part["properties"].items():
            assert inner["description"].endswith("."), f"{path}{name}"
            if "properties" in inner:
                compare(inner, known[name], f"{path}{name}.")

    compare(schema, values, "")
    assert len(list(leaves(schema, values))) > 30


def test_the_page_of_the_chart_is_the_one_that_its_values_make() -> None:
    assert PAGE.read_text() == render(), "run: make generate"


def test_the_chart_says_what_artifact_hub_asks_for() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    assert chart["icon"].startswith("data:image/svg+xml;base64,")
    assert {"artifacthub.io/category", "artifacthub.io/license", "artifacthub.io/changes"} <= set(
        chart["annotations"]
    )
    version = re.search(
        r'__version__ = "([^"]+)"', (CHART.parents[1] / "cli/kdist/__init__.py").read_text()
    )
    assert version is not None
    assert chart["appVersion"] == version[1]


def test_an_agent_that_has_finished_waits_longer_than_prometheus_takes_to_come_again() -> None:
    monitor = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["podMonitor"]
    waits = TrainConfig.model_fields["final_scrape_timeout_seconds"].default
    assert int(monitor["interval"].removesuffix("s")) < waits


def written(path: Path) -> str:
    """What a file says to people: of a module, its texts."""
    if path.suffix != ".py":
        return path.read_text()
    found = [
        each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Constant)
    ]
    return "\n".join(each.value for each in found if isinstance(each.value, str))


def test_every_value_of_the_chart_that_a_page_or_an_advice_names_can_be_set() -> None:
    def knows(part: dict[str, Any], names: list[str]) -> bool:
        if not names or "properties" not in part:
            return part["type"] == "object" or not names
        return names[0] in part["properties"] and knows(part["properties"][names[0]], names[1:])

    schema = json.loads((CHART / "values.schema.json").read_text())
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in files()
        if (path.suffix == ".md" and path.name != "CHANGELOG.md")
        or (path.suffix == ".py" and path.is_relative_to(ROOT / "cli"))
        or path == CHART / "templates" / "NOTES.txt"
        for name in VALUE.findall(written(path))
        if not name.startswith(GROUPS)
    }
    assert {path.split("/")[0] for path, _ in found} >= {"charts", "cli", "docs"}
    assert {each for each in found if not knows(schema, each[1].split("."))} == set()

"""What the rules share with templates, pages and code, which no Prometheus is needed to compare."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from tests.charts.rules import CHART, CONTROLLER, FILES
from tests.docs.blocks import DOCS

PAGE: Final = (DOCS / "how-to/monitoring.md").read_text()
TEMPLATES: Final = {path.name: path.read_text() for path in (CHART / "templates").glob("*.yaml")}


def of_page() -> list[dict[str, Any]]:
    """The configurations of a Prometheus on the page."""
    found = [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    return [each for each in found if "scrape_configs" in each]


def test_the_page_loads_each_rule_file_with_the_job_that_its_rules_select() -> None:
    loaded = {}
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


def test_the_page_labels_series_as_the_pod_monitor_does() -> None:
    template = TEMPLATES["podmonitor.yaml"]
    (source,) = re.findall(r"sourceLabels: \[(\S+)\]\n +targetLabel: kdist_job\n", template)
    (dropped,) = re.findall(r"action: labeldrop\n +regex: (\S+)", template)
    (scrape,) = of_page()[0]["scrape_configs"]
    assert {"source_labels": [source], "target_label": "kdist_job"} in scrape["relabel_configs"]
    assert scrape["metric_relabel_configs"] == [{"regex": dropped, "action": "labeldrop"}]

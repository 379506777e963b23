"""docs/how-to/kubernetes.md says of the workload kinds and their objects what the code does."""

from __future__ import annotations

import re

import pytest
import yaml

from kdist import backends
from kdist.render import find_pods
from kdist.render.overlay import violations
from tests.charts import rights_files
from tests.house.tree import ROOT
from tests.manifests.jobs import FULL, load, make, place
from tools.reference import rights

PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|")
]


def test_what_each_command_may_need_is_the_table_of_rights() -> None:
    how = "run: make generate"
    assert rights_files.page() == PAGE, how
    assert rights_files.TEMPLATE.read_text() == rights.roles_template(), how


@pytest.mark.parametrize("name", backends.NAMES)
def test_the_table_of_kinds_is_true(name: str) -> None:
    backend = backends.get(name)
    (head,) = [row for row in ROWS if row[:2] == ["backend", "kind"]]
    rows = [dict(zip(head, row, strict=True)) for row in ROWS if row[0] == f"`{name}`"]
    assert len(rows) == 1, f"docs/how-to/kubernetes.md, column backend: one row for `{name}`"
    slow = any("re-creates a lost pod after 10 s" in line for line in backend.warnings(make()))
    whole = "jobset" in backend.parts
    together = "at once, together with all other pods"
    expected = {
        "kind": backend.kind,
        "ends by itself": "no" if backend.keeps_alive else "yes",
        "scaled while it runs": "no" if backend.scalable else "yes",
        "a lost pod is re-created": (
            "after 10 s … 10 min" if slow else together if whole else "at once"
        ),
        "container": f"`{backend.container}`",
    }
    for column, value in expected.items():
        assert rows[0][column] == value, f"docs/how-to/kubernetes.md, `{name}`, column {column}"
    rendered = str([each.document for each in place(load(FULL), name) if each.kind != "ConfigMap"])
    removed = rows[0]["removed after `ttlSecondsAfterFinished`"]
    assert removed.startswith("yes") == ("ttlSecondsAfterFinished" in rendered)


def test_every_object_that_is_rendered_is_in_the_table_of_objects() -> None:
    reported = {kind for row in ROWS for kind in re.split(", ", row[0])}
    workloads = {backends.get(name).kind for name in backends.NAMES} | {"TrainingRuntime"}
    rendered = {each.kind for name in backends.NAMES for each in place(load(FULL), name)}
    assert rendered - workloads <= reported


def test_every_setting_of_the_page_on_networks_is_one_that_a_restricted_namespace_takes() -> None:
    page = (ROOT / "docs" / "how-to" / "networks.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    jobs = [block["spec"] for block in blocks if set(block) == {"spec"}]
    assert len(jobs) == 4
    for spec in jobs:
        document = make().model_dump(mode="json", by_alias=True)
        train = {**document["spec"]["train"], **spec.get("train", {})}
        document["spec"] = {**document["spec"], **spec, "train": train}
        (pod,) = [pod for each in place(load(document), "job") for pod in find_pods(each.document)]
        assert violations(pod) == []

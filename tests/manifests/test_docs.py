"""docs/kubernetes.md says of the workload kinds and their objects what the code does."""

from __future__ import annotations

import re

import pytest

from kdist import backends, rights
from tests.charts import rights_files
from tests.house.tree import ROOT
from tests.manifests.jobs import FULL, load, place

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]


def test_what_each_command_may_need_is_the_table_of_rights() -> None:
    how = "run: python -m tests.charts.rights_files"
    assert rights_files.page() == PAGE, how
    assert rights_files.TEMPLATE.read_text() == rights.chart_templates(), how


@pytest.mark.parametrize("name", backends.NAMES)
def test_the_table_of_kinds_is_true(name: str) -> None:
    backend = backends.get(name)
    (row,) = [row for row in ROWS if row[0] == f"`{name}`"]
    assert row[1] == backend.kind
    assert row[3] == ("no" if backend.parks else "yes")
    assert row[5] == ("no" if backend.scalable else "yes")
    assert row[6] == f"`{backend.container}`"
    rendered = str([each.document for each in place(load(FULL), name) if each.kind != "ConfigMap"])
    assert row[4].startswith("yes") == ("ttlSecondsAfterFinished" in rendered)


def test_every_object_that_is_rendered_is_in_the_table_of_objects() -> None:
    told = {kind for row in ROWS for kind in re.split(", ", row[0])}
    workloads = {backends.get(name).kind for name in backends.NAMES} | {"TrainingRuntime"}
    rendered = {each.kind for name in backends.NAMES for each in place(load(FULL), name)}
    assert rendered - workloads <= told

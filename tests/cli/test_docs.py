"""The documentation of job.yaml is the model's, and its example is a job.

`KDIST_REGENERATE=1 pytest tests/cli/test_docs.py` writes the generated parts again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kdist.job_file import load_text
from kdist.spec import reference
from tests.cli.conftest import Kdist

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "job-yaml.md"
TABLE = re.compile(r"(<!-- made by .*? -->\n).*(<!-- end -->\n)", re.DOTALL)


def test_the_table_of_fields_is_the_models(kdist: Kdist) -> None:
    table = kdist("explain", "-o", "markdown").stdout
    page = PAGE.read_text()
    fresh = TABLE.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", page)
    if os.environ.get("KDIST_REGENERATE"):
        PAGE.write_text(fresh)
    assert PAGE.read_text() == fresh
    assert all(f"`{field.path}`" in fresh for field in reference.root().walk())


def test_the_schema_in_the_documentation_is_the_models(kdist: Kdist) -> None:
    file = DOCS / "job.schema.json"
    fresh = kdist("explain", "-o", "jsonschema").stdout
    if os.environ.get("KDIST_REGENERATE"):
        file.write_text(fresh)
    assert file.read_text() == fresh


def test_the_example_is_a_job_and_so_is_its_other_half() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert load_text(example, source="the page").spec.train is not None
    other = re.sub(r"(?m)^  train:.*\n(    .*\n)*", "", example).replace("# script: {", "script: {")
    assert load_text(other, source="the page").spec.script is not None


def test_the_problem_that_the_page_shows_is_the_one_that_is_reported(kdist: Kdist) -> None:
    shown = re.findall(r"```\n(job\.yaml:.*?)```", PAGE.read_text(), re.DOTALL)[0]
    result = kdist("validate", str(DOCS.parent / "tests/cli/job_file/bad/many-at-once.yaml"))
    lines = shown.splitlines()
    assert lines[0].split(": ", 1)[1] in result.stderr
    assert lines[1].split("| ")[1] in result.stderr

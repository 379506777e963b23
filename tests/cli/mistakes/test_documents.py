"""Files with several YAML documents: every command that can take several jobs takes them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kdist.errors import UsageError
from kdist.job import find
from tests.cli.conftest import Kdist


@pytest.fixture
def two_jobs(job_file: Path, job: str) -> Path:
    """A job.yaml with the jobs digits and letters, an empty document, and a comment."""
    job = job.replace("spec:\n", "spec:\n  image: trainer:1\n")
    second = job.replace("name: digits", "name: letters\n  namespace: ml")
    job_file.write_text(f"---\n{job}---\n# the next one\n---\n{second}...\n")
    return job_file


def test_validate_names_each_job(two_jobs: Path, kdist: Kdist) -> None:
    result = kdist("validate", two_jobs.name)
    assert [line.split()[2] for line in result.stdout.splitlines()] == ["digits", "letters"]
    assert result.exit_code == 0


def test_problems_of_all_documents_come_at_once_at_their_lines(
    two_jobs: Path, kdist: Kdist
) -> None:
    two_jobs.write_text(two_jobs.read_text().replace("epochs: 5", "epochs: many"))
    lines = two_jobs.read_text().splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if "many" in line]
    result = kdist("validate", two_jobs.name)
    found = [line for line in result.stderr.splitlines() if line.startswith(two_jobs.name)]
    assert [int(line.split(":")[1]) for line in found] == wrong
    assert len(wrong) == 2


def test_render_and_apply_take_all_jobs(two_jobs: Path, kdist: Kdist) -> None:
    rendered = list(yaml.safe_load_all(kdist("render", two_jobs.name).stdout))
    names = {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in rendered}
    applied = kdist("apply", two_jobs.name, "--dry-run=client", "-o", "name").stdout
    assert names == {"digits", "letters"}
    assert applied == "job/digits\njob/letters\n"


def test_delete_means_every_job_of_the_file(two_jobs: Path) -> None:
    expected = [("digits", None), ("letters", "ml")]
    assert find.refer_all(None, two_jobs.name) == expected
    assert find.refer_all(two_jobs.name, None) == expected
    assert find.refer_all("digits", None) == [("digits", None)]


def test_commands_for_one_job_name_those_of_the_file(two_jobs: Path, kdist: Kdist) -> None:
    result = kdist("run", two_jobs.name)
    assert result.exit_code == 2
    assert "has 2 jobs, digits and letters" in result.stderr
    with pytest.raises(UsageError, match="digits and letters"):
        find.refer(two_jobs.name)


def test_an_alias_does_not_reach_into_the_next_document(kdist: Kdist, job_file: Path) -> None:
    text = job_file.read_text()
    second = text.replace("epochs: 5", "epochs: *many")
    job_file.write_text(text.replace("epochs: 5", "epochs: &many 5") + "---\n" + second)
    result = kdist("validate", job_file.name)
    assert f"{job_file.name}:{len(text.splitlines()) * 2 + 1}:13: the alias" in result.stderr

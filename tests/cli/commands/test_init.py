"""`kdist init` writes a job.yaml that is valid, says what its fields are, and never writes over
another.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from kdist.commands.init import TEMPLATES
from kdist.commands.init import command as init
from kdist.job_file import load_file, load_text
from kdist.spec import reference, scaffold
from tests.cli.conftest import Kdist
from tests.house.tree import ROOT

CONTAINER = {"name": "a", "image": "registry.example.com/a:1", "command": ["python", "train.py"]}
WORKLOAD = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "old"},
    "spec": {"template": {"spec": {"containers": [CONTAINER]}}},
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_offers_every_template() -> None:
    assert set(TEMPLATES) == set(scaffold.TEMPLATES)
    examples = str(init.help).partition("Examples:")[2].partition("\n\n")[0]
    assert [each for each in TEMPLATES if not re.search(rf"\b{each}\b", examples)] == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_written_is_valid(template: str, kdist: Kdist) -> None:
    written = kdist("init", "--template", template)
    assert (written.exit_code, written.stdout) == (0, "")
    assert written.stderr.endswith("Next: kdist run job.yaml\n")
    assert kdist("validate", "job.yaml").exit_code == 0


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_field_that_is_commented_out_is_valid_when_it_is_taken(template: str) -> None:
    text = scaffold.write(template)
    taken = re.sub(r"^( *)#(?=[a-zA-Z])", r"\1", text, flags=re.MULTILINE)
    assert taken != text
    assert load_text(taken, source=template).spec.image is not None


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_field_stands_below_its_sentence(template: str) -> None:
    text = " ".join(
        line.strip().removeprefix("# ") for line in scaffold.write(template).splitlines()
    )
    job = scaffold.TEMPLATES[template]["spec"]
    for name in job:
        field = reference.find(("spec", name))
        assert field is not None
        assert field.description in text


def test_the_digits_template_trains_digits_elastically(kdist: Kdist) -> None:
    kdist("init")
    job = load_file("job.yaml")
    assert job.spec.train is not None
    assert (job.spec.train.workload, job.spec.nodes.min, job.spec.nodes.max) == ("digits", 1, 2)


def test_the_modeline_leads_editors_to_the_schema(kdist: Kdist, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    kdist("init", "jobs/mine.yaml")
    first = (tmp_path / "jobs/mine.yaml").read_text().splitlines()[0]
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads((tmp_path / "jobs" / schema).read_text()) == reference.schema()


def test_a_file_that_is_there_is_kept(kdist: Kdist, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    refused = kdist("init")
    assert refused.exit_code == 2
    assert refused.stderr == (
        "Error: `job.yaml` exists already\nHint: name another file, or overwrite it\n"
        "Next: kdist init job.yaml --force\n"
    )
    assert (tmp_path / "job.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["job.yaml", "my jobs.yaml"])
@pytest.mark.parametrize("typed", [("-t", "gpt"), ("-t", "script"), ("--from", "old one.yaml")])
def test_the_command_that_overwrites_it_keeps_what_was_typed(
    typed: tuple[str, ...], name: str, kdist: Kdist, tmp_path: Path
) -> None:
    (tmp_path / "old one.yaml").write_text(json.dumps(WORKLOAD))
    wanted = kdist("init", "-", *typed).stdout
    (tmp_path / name).write_text("mine")
    refused = kdist("init", name, *typed)
    assert (refused.exit_code, (tmp_path / name).read_text()) == (2, "mine")
    program, *words = shlex.split(refused.stderr.rpartition("Next: ")[2])
    assert program == "kdist"
    assert kdist(*words).exit_code == 0
    assert wanted.partition("\n")[2].rstrip() in (tmp_path / name).read_text()


def test_force_writes_over_it(kdist: Kdist, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    assert kdist("init", "--force").exit_code == 0
    assert "kind: TrainingJob" in (tmp_path / "job.yaml").read_text()


WITH_CODE = [name for name in TEMPLATES if scaffold.read_code(name)]


def test_every_template_but_those_of_shipped_workloads_has_code_and_a_test_of_it() -> None:
    assert set(TEMPLATES) - set(WITH_CODE) == {"digits", "gpt"}
    page = (ROOT / "docs/tutorials/own-model.md").read_text()
    assert {*re.findall(r"-t ([a-z]+)", page)} == {*WITH_CODE}
    for name in WITH_CODE:
        code, test = sorted(scaffold.read_code(name), key=lambda each: "test_" in each)
        assert test == code.replace("src/", "src/test_")


def test_the_code_is_next_to_the_job_file(kdist: Kdist, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    written = kdist("init", "jobs/mine.yaml", "-t", "huggingface")
    assert written.stderr == (
        "Wrote jobs/mine.yaml, jobs/src/test_train.py, jobs/src/train.py.\n"
        "The script needs transformers and accelerate next to kdist.\n"
        "`pytest jobs/src` tests the code in seconds.\n"
        "Next: kdist run jobs/mine.yaml\n"
    )
    assert kdist("validate", "jobs/mine.yaml").exit_code == 0


@pytest.mark.parametrize("template", WITH_CODE)
def test_no_code_is_ever_overwritten(template: str, kdist: Kdist, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in scaffold.read_code(template):
        (tmp_path / name).write_text("mine")
        refused = kdist("init", "-t", template, "--force")
        assert refused.exit_code == 2
        assert refused.stderr == (
            f"Error: `{name}` exists already\n"
            f"Hint: code is never overwritten; `kdist init - -t {template}` prints the job alone\n"
        )
        assert [path.name for path in tmp_path.rglob("*.*")] == [(tmp_path / name).name]
        (tmp_path / name).unlink()


def test_a_dash_writes_to_stdout_and_no_file(kdist: Kdist, tmp_path: Path) -> None:
    result = kdist("init", "-", "-t", "script")
    assert load_text(result.stdout, source="stdout").spec.script is not None
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_error_with_its_reason(kdist: Kdist) -> None:
    result = kdist("init", "no/job.yaml")
    assert result.exit_code == 2
    assert result.stderr == "Error: cannot write `no/job.yaml`: No such file or directory\n"

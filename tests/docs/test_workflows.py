"""What docs/how-to/workflows.md tells engines to wait for is what the backends themselves read, and
the commands and jobs of its examples exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdist import backends
from kdist.app import load_command
from kdist.errors import Code
from tests.cli.conftest import Kdist
from tests.cli.conftest import kdist as kdist
from tests.docs.blocks import DOCS, blocks

PAGE = DOCS / "how-to" / "workflows.md"
TEXT = PAGE.read_text()
ROWS = {
    found[1]: (found[2], found[3])
    for found in re.finditer(r"^\|.*`backend: (\w+)` \|(.*)\|(.*)\|$", TEXT, re.MULTILINE)
}
JOBSET = [{"name": "node", "ready": 1, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}]


def conditions(*types: str) -> list[dict[str, str]]:
    return [{"type": each, "status": "True"} for each in types]


def test_the_exit_codes_of_a_step_are_those_of_kdist() -> None:
    table = TEXT.partition("| exit code |")[2].partition("\n\n")[0].splitlines()[2:]
    said = {each.split("|")[1].strip(): each.split("|")[2].strip() for each in table}
    tried_again = f"{Code.UNREACHABLE:d}, {Code.TIMEOUT:d}"
    assert [*said] == [
        *(f"{each:d}" for each in (Code.OK, Code.JOB_FAILED, Code.JOB_CANCELLED)),
        tried_again,
    ]
    assert said[f"{Code.OK:d}"] == "is done"
    assert said[f"{Code.JOB_FAILED:d}"].startswith("has failed")
    assert said[f"{Code.JOB_CANCELLED:d}"] == "was stopped"
    assert re.search("API server was unreachable, or `--timeout` has passed", said[tried_again])
    assert f'expression: "asInt(lastRetry.exitCode) in [{tried_again}]"' in TEXT


# As each operator's controller writes them: the order of conditions is that of their first time.
STATUS: dict[str, dict[str, dict[str, Any]]] = {
    "job": {
        "running": {"active": 2, "failed": 3, "succeeded": 1},
        "suspended": {"conditions": conditions("Suspended")},
        "succeeded": {
            "conditions": [
                {"type": "Suspended", "status": "False"},
                *conditions("SuccessCriteriaMet", "Complete"),
            ],
            "completionTime": "2026-01-01T00:00:00Z",
        },
        "failed": {"conditions": conditions("FailureTarget", "Failed"), "failed": 7},
    },
    "jobset": {
        "running": {"restarts": 1, "replicatedJobsStatus": JOBSET},
        "suspended": {"conditions": conditions("Suspended")},
        "succeeded": {"conditions": conditions("Completed"), "terminalState": "Completed"},
        "failed": {
            "conditions": conditions("StartupPolicyCompleted", "Failed"),
            "terminalState": "Failed",
        },
    },
    "trainjob": {
        "running": {"jobsStatus": JOBSET},
        "suspended": {"conditions": conditions("Suspended"), "jobsStatus": JOBSET},
        "succeeded": {
            "conditions": [{"type": "Suspended", "status": "False"}, *conditions("Complete")],
            "jobsStatus": [{**JOBSET[0], "succeeded": 1}],
        },
        "failed": {"conditions": conditions("Failed"), "jobsStatus": [{**JOBSET[0], "failed": 1}]},
    },
    "pytorchjob": {
        "running": {"conditions": conditions("Created", "Running", "Restarting")},
        "suspended": {"conditions": conditions("Created", "Suspended")},
        "succeeded": {
            "conditions": conditions("Created", "Running", "Succeeded"),
            "completionTime": "2026-01-01T00:00:00Z",
        },
        "failed": {
            "conditions": conditions("Created", "Suspended", "Running", "Restarting", "Failed"),
            "completionTime": "2026-01-01T00:00:00Z",
        },
    },
}


def look_up(document: Any, path: str) -> Any:
    """A dotted path, as GJSON reads it."""
    for name in path.split("."):
        at = int(name) if name.isdigit() else name
        try:
            document = document[at]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def terms(selector: str, document: dict[str, Any]) -> Iterator[bool]:
    """Whether each term of a label selector holds for a document, as Argo asks."""
    for term in re.split(r",\s*(?![^()]*\))", selector.strip()):
        found = re.fullmatch(r"([\w.]+)(?: (==|in) (?:\(([\w, ]+)\)|(\w+)))?", term)
        assert found, term
        value = look_up(document, found[1])
        wanted = re.split(", *", found[3] or found[4] or "")
        yield value is not None if found[2] is None else str(value) in wanted


def argo(success: str, failure: str, document: dict[str, Any]) -> str | None:
    """How Argo ends a step: one term of failure suffices, and it is looked at first."""
    if any(terms(failure, document)):
        return "failed"
    return "succeeded" if all(terms(success, document)) else None


def test_the_page_names_every_backend() -> None:
    assert set(ROWS) == set(backends.NAMES)


FAILED_ANYWHERE = next(
    yaml.safe_load(block.text)["resource"]["failureCondition"]
    for block in blocks(TEXT)
    if block.text.startswith("resource:")
)


@pytest.mark.parametrize("name", STATUS)
@pytest.mark.parametrize("state", ["running", "suspended", "succeeded", "failed"])
def test_an_engine_and_kdist_read_the_same_end(name: str, state: str) -> None:
    workload = {"status": STATUS[name][state]}
    ended = state if state in ("succeeded", "failed") else None
    assert backends.get(name).read(workload).finished == ended
    good, bad = ([*re.findall(r"`(status\.[^`]+)`", cell), None][0] for cell in ROWS[name])
    assert argo(str(good), str(bad or FAILED_ANYWHERE), workload) == ended
    named = {
        kind: re.findall(r"condition `(\w+)`", cell)[0]
        for kind, cell in zip(("succeeded", "failed"), ROWS[name], strict=True)
    }
    true = {
        each["type"]
        for each in STATUS[name][state].get("conditions", ())
        if each["status"] == "True"
    }
    assert {kind for kind, condition in named.items() if condition in true} == {ended} - {None}


def manifests(document: Any) -> Iterator[dict[str, Any]]:
    """The templates of a workflow that make an object."""
    if isinstance(document, dict):
        yield from (document["resource"] for _ in [0] if "resource" in document)
        for each in document.values():
            yield from manifests(each)
    elif isinstance(document, list):
        for each in document:
            yield from manifests(each)


def test_the_job_in_an_example_is_valid(kdist: Kdist, tmp_path: Path) -> None:
    texts = [
        resource["manifest"]
        for block in blocks(TEXT)
        if block.language == "yaml"
        for resource in manifests(yaml.safe_load(block.text))
        if "TrainingJob" in resource["manifest"]
    ]
    assert texts
    for text in texts:
        (tmp_path / "job.yaml").write_text(text.replace("generateName: digits-", "name: digits-x"))
        result = kdist("validate", str(tmp_path / "job.yaml"))
        assert result.exit_code == 0, result.stderr


def test_the_commands_of_the_steps_exist() -> None:
    """Typed in the page's text, or as the list of a container."""
    flat = re.sub(r"""[",\[\]\s]+""", " ", "".join(block.text for block in blocks(TEXT)))
    found = re.findall(r"\bkdist (apply|delete|report) (.*?)(?=\bkdist (?:apply|del|rep)|$)", flat)
    assert {name for name, _ in found} == {"apply", "delete", "report"}
    for name, rest in found:
        known = {each for param in load_command(name).params for each in param.opts}
        used = set(re.findall(r"(?<!\S)--[a-z-]+", rest))
        assert used <= known, name


@pytest.mark.parametrize("field", ["metadata.name=x", "spec.train.optimizer.learningRate=0.1"])
def test_the_fields_that_the_examples_set_exist(field: str, kdist: Kdist) -> None:
    assert field.partition("=")[0] in TEXT
    result = kdist("validate", "examples/digits.yaml", "--set", field)
    assert result.exit_code == 0, result.stderr

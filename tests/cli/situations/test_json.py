"""Every command with `-o json`, as a program types it: one document, also for an error or for
nothing, and the documents that it prints are those of docs/reference/output.schema.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kdist.app import COMMANDS, load_command
from kdist.errors import Code
from tests.cli import documents
from tests.cli.conftest import Kdist
from tests.cli.situations import test_situations
from tests.cli.situations.terminal import show
from tests.cli.situations.test_situations import TENSORBOARD, TYPED

home, serve, _hurry, situation = (
    test_situations.home,
    test_situations.serve,
    test_situations._hurry,
    test_situations.situation,
)

MORE = (
    *("get", "get digits digits", "get nobody", "delete nobody", "logs digits", "top digits"),
    *("scale digits --nodes many", "scale digits --nodes 3 --dry-run=client", "drill digits"),
    *("drill digits --fault rank --dry-run=client", "wait digits --for=first-step"),
    *("delete nobody --ignore-not-found", "events digits --types=Warning", "exec digits -- false"),
    *("checkpoints verify digits", "checkpoints export digits --out model.safetensors"),
    *("report digits --out report.json", "diff nothing.yaml", "apply job.yaml --dry-run=client"),
    *("apply job.yaml --follow", "render job.yaml", "doctor --timeout 1", "status"),
)
ALONE = {
    "init new.yaml": "Files",
    "init new.yaml --force": "Files",
    "init -": "JobFile",
    "init job.yaml": "Error",
    "convert -- torchrun train.py --lr 1": "Conversion",
    "convert nothing.yaml": "Error",
    "validate job.yaml": "Validation",
    "validate nothing.yaml": "Error",
    "validate": "Error",
    "explain spec.nodes": "Field",
    "explain -r": "Field",
    "explain spec.nobody": "Error",
    "render job.yaml": "List",
    "render job.yaml --set spec.nodes=0": "Error",
    "run nothing.yaml": "Error",
    "run job.yaml --nodes many": "Error",
    "run -d job.yaml --set spec.suspend=true": "Error",
    "bench all_reduce --slow 0": "Error",
    "bench other": "Error",
    "apply nothing.yaml": "Error",
    "get --local": "JobList",
    "get --local nobody": "Error",
    "doctor --local": "Checks",
    "dashboards export fleet": "Dashboard",
    "dashboards export --out boards": "Files",
    "dashboards export other": "Error",
    "completion bash": "CompletionScript",
    "completion csh": "Error",
    "version": "Version",
}
NAMES = [name for section in COMMANDS.values() for name in section]


def with_json(command: str) -> list[str]:
    """The words of a command that asks for JSON."""
    own, dashes, rest = command.partition(" -- ")
    return [*own.split(), "-o", "json", *([dashes.strip(), *rest.split()] if dashes else [])]


def commands_of(name: str) -> Iterator[click.Command]:
    """A command, or those of a group."""
    command = load_command(name)
    yield from command.commands.values() if isinstance(command, click.Group) else (command,)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_offers_json(name: str) -> None:
    for command in commands_of(name):
        (option,) = (each for each in command.params if "--output" in each.opts)
        assert "json" in str(option.metavar).split("|")


@pytest.mark.sampled
def test_every_command_prints_one_document_whatever_there_is(
    situation: str, kdist: Kdist, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = set[str]()
    unknown = situation == "unknown-name"
    for command in dict.fromkeys([*TYPED[situation][:13], *MORE, *TYPED[situation]]):
        words = with_json(command.replace("digits", "digit") if unknown else command)
        if "port-forward" in command:
            _, printed = show(*words, press_at="127.0.0.1" if command == TENSORBOARD else "localP")
            lines = printed.split("\n")
            ours = [number for number, line in enumerate(lines) if line.startswith(("{", "}"))]
            text = "\n".join(lines[ours[0] : ours[-1] + 1])
            code = None
        else:
            ended = kdist(*words)
            code, text = ended.exit_code, ended.stdout
        (document,) = documents.read(text)
        kinds.add(document["kind"])
        if document["kind"] == "Error":
            assert code in (None, document["exitCode"]), command
            assert document["exitCode"] != Code.OK
            assert "internal error" not in document["message"]
    assert {"Error", "JobList"} <= kinds
    assert kinds >= (
        {"JobStatus", "Logs", "Diagnosis", "Top", "Change", "Execution", "Diff", "Deletion", "List"}
        if situation == "job-on-a-cluster"
        else set()
    )


@pytest.mark.parametrize("situation", ["job-on-a-cluster"], indirect=True)
def test_what_a_suspension_has_saved_is_a_field_of_its_change_and_of_the_status(
    situation: str, kdist: Kdist, home: Path
) -> None:
    assert kdist("apply", "job.yaml").exit_code == Code.OK
    change = json.loads(kdist("suspend", "digits", "-o", "json").stdout)
    assert (change["savedStep"], change["nextCommand"]) == (64, "kdist resume digits -n ml")
    assert change["message"] == "digits suspended; step 64 is saved"
    assert kdist("suspend", "digits").stdout == "digits is already suspended\n"
    status = json.loads(kdist("status", "digits", "-o", "json").stdout)
    assert (status["phase"], status["lastCheckpointStep"]) == ("Suspended", 64)


@pytest.mark.parametrize(("command", "kind"), ALONE.items())
def test_a_command_without_a_job_prints_one_document(
    command: str, kind: str, kdist: Kdist, home: Path
) -> None:
    ended = kdist(*with_json(command))
    (document,) = documents.read(ended.stdout)
    assert document["kind"] == kind, document
    assert ended.exit_code == document.get("exitCode", ended.exit_code)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_line_that_cannot_be_read_is_an_error_in_json(
    name: str, kdist: Kdist, home: Path
) -> None:
    within = ["dashboards", "export"] if name == "dashboards" else [name]
    for words in ([*within, "--nonsense", "-o", "json"], [*within, "--output=json", "--nonsense"]):
        ended = kdist(*words)
        (document,) = documents.read(ended.stdout)
        assert (document["kind"], document["exitCode"], ended.exit_code) == ("Error", 2, 2)
        assert "--nonsense" in document["message"]
        assert document["nextCommand"] == f"kdist {' '.join(within)} --help"


def test_words_behind_two_dashes_ask_for_nothing(kdist: Kdist, home: Path) -> None:
    assert kdist("exec", "nobody", "--", "tool", "-o", "json").stdout == ""
    (document,) = documents.read(kdist("nonsense", "-o", "json").stdout)
    assert "there is no command" in document["message"]


def test_warnings_are_repeated_in_the_document(kdist: Kdist, home: Path) -> None:
    with Path("job.yaml").open("a") as file:
        file.write("  env: [{name: API_TOKEN, value: 0123456789abcdef0123456789abcdef}]\n")
    shown = json.loads(kdist("validate", "job.yaml", "-o", "json").stdout)
    (warning,) = (each for each in shown["files"][0]["warnings"] if "API_TOKEN" in each)
    assert warning.startswith("job.yaml:14:")


def test_the_schema_uses_what_the_test_understands_and_refuses_what_is_wrong() -> None:
    def keywords(schema: dict[str, Any]) -> Iterator[str]:
        yield from schema
        inner: list[Any] = [schema.get("items"), schema.get("additionalProperties")]
        for each in (*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *inner):
            yield from keywords(each) if isinstance(each, dict) else ()

    for each in documents.SCHEMA["$defs"].values():
        assert set(keywords(each)) <= documents.KEYWORDS
    version = {"apiVersion": "cli.kdist.dev/v1", "kind": "DetachedRun", "job": "a", "log": "b"}
    good: Callable[..., str] = lambda **more: json.dumps({**version, "pid": 1, **more})  # noqa: E731
    documents.read(good())
    for more in ({"pid": "1"}, {"pid": True}, {"more": 1}, {"log": 1}, {"apiVersion": "v1"}):
        with pytest.raises(AssertionError):
            documents.read(good(**more))
    with pytest.raises(AssertionError):
        documents.read("")

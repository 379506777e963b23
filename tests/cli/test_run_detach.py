"""`kdist run --detach`, and Ctrl-C twice while a run starts, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.errors import Code
from kdist.job.local.agents import is_active
from kdist.job.local.end_report import read_saved_step
from tests.cli import documents
from tests.cli.running import PATIENCE

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.yaml"


def command(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kdist", "run", *arguments],
        cwd=home,
        env={**os.environ, "KDIST_HOME": str(home / "runs"), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.sampled
@pytest.mark.processes
def test_a_detached_run_goes_on_after_the_command_and_saves_on_sigterm(tmp_path: Path) -> None:
    process = command(tmp_path, "-d", str(EXAMPLE), "--set", "spec.nodes=1")
    out, errors = process.communicate(timeout=PATIENCE)
    root = tmp_path / "runs" / "digits"
    try:
        assert process.returncode == Code.OK, errors
        assert out == "digits\n"
        assert "Next: kdist status digits" in errors
        assert is_active(root)
        run = json.loads((root / "run.json").read_text())
        again = ["run", "--set", "spec.nodes=1", str(EXAMPLE)]
        assert run["invocations"][-1]["command"] == again
        assert run["invocations"][-1]["cwd"] == str(tmp_path)
        assert "/metrics" in (root / "run.log").read_text()
    finally:
        os.kill(int((root / "lock").read_text()), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (
            "spec.code=nowhere",
            f"--set spec.code=nowhere: spec.code: there is no {EXAMPLE.parent / 'nowhere'}\n",
        ),
        (
            "spec.env=[{name: TOKEN, secret: {name: hub, key: token}}]",
            "Error: TOKEN is a secret (key token of the Secret hub on a cluster): "
            "set it in the environment of kdist run\n",
        ),
    ],
    ids=["before it begins", "in the background"],
)
def test_a_detached_run_that_cannot_start_shows_its_error(
    tmp_path: Path, setting: str, error: str
) -> None:
    process = command(tmp_path, "-d", str(EXAMPLE), "--set", setting, "-o", "json")
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == Code.USAGE
    assert error in errors
    (document,) = documents.read(out)
    assert (document["kind"], document["exitCode"]) == ("Error", Code.USAGE)
    messages = [document["message"], *(each["message"] for each in document["problems"])]
    reason = error.removeprefix("Error: ").strip()
    assert any(each in error or reason in each for each in messages), messages
    assert not list((tmp_path / "runs").glob(".run-*"))


@pytest.mark.processes
def test_the_document_of_a_detached_run_that_fails_has_the_hint_that_is_printed(
    tmp_path: Path,
) -> None:
    first = command(tmp_path, str(EXAMPLE), "--set", "metadata.name=x", "--set", "spec.nodes=1")
    assert first.stderr is not None
    assert any("agent-started" in line for line in first.stderr)
    process = command(tmp_path, "-d", str(EXAMPLE), "--set", "metadata.name=x", "-o", "json")
    out, errors = process.communicate(timeout=PATIENCE)
    first.kill()
    first.communicate(timeout=PATIENCE)
    (document,) = documents.read(out)
    assert (document["kind"], document["exitCode"]) == ("Error", process.returncode), errors
    assert "another kdist run" in document["message"]
    stop = "`kdist suspend x`, or Ctrl-C there"
    assert document["hint"] == f"stop it first: {stop}; or give this job another metadata.name"
    assert f"Hint: {document['hint']}" in errors
    assert "Hint" not in document["message"]


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("seen", ["agent-started", "load torch", "rendezvous"])
def test_ctrl_c_twice_while_a_run_starts_prints_no_traceback(tmp_path: Path, seen: str) -> None:
    process = command(tmp_path, str(EXAMPLE))
    assert process.stderr is not None
    printed = ""
    while seen not in printed:
        line = process.stderr.readline()
        assert line, printed
        printed += line
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode == Code.INTERRUPTED, printed + rest
    for word in ("Traceback", "frame #", "terminate called", "KeyboardInterrupt"):
        assert word not in printed + rest


def test_the_saved_step_is_that_of_the_last_commit_in_the_ledger(tmp_path: Path) -> None:
    assert read_saved_step(tmp_path) == (None, None)
    (tmp_path / "ledger").mkdir()
    lines = [
        {"event": "commit", "step": 50, "time": 1.5},
        {"event": "commit", "step": 90, "time": 2.5},
        {"event": "done", "step": 90, "time": 3.5},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "ledger" / "events.jsonl").write_text(text)
    assert read_saved_step(tmp_path) == (90, 2.5)

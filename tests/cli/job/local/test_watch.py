"""`kdist status -w` and `kdist events -w` of a run on this machine, on a real terminal and without
one.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.errors import Code
from tests.cli.conftest import Kdist, ServeAgent
from tests.cli.job.cluster.terminal import Terminal
from tests.cli.status.objects import report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run digits on one node."""
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    found = tmp_path / "runs" / "digits"
    (found / "node-0").mkdir(parents=True)
    end(found, None)
    return found


def end(folder: Path, outcome: str | None) -> None:
    """Record how the run ended; None while it has not."""
    begun = {"started": 1.0, "ended": None, "outcome": outcome}
    document = {"run_id": "a", "created": 1.0, "invocations": [begun]}
    (folder / "run.json").write_text(json.dumps(document))


@pytest.fixture
def lock(folder: Path) -> Iterator[int]:
    """The lock that an active `kdist run` holds: here this process does."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


@pytest.mark.processes
def test_an_active_run_is_drawn_until_its_end_as_a_job_on_a_cluster_is(
    folder: Path, lock: int, serve_agent: ServeAgent
) -> None:
    terminal = Terminal("status", "digits", "-w")
    try:
        assert terminal.shows(lambda frame: "the agents load torch" in frame), terminal.frame()
        port = serve_agent(json.dumps(report(step=120)).encode(), 200)
        (folder / "node-0" / "agent.json").write_text(json.dumps({"port": port, "pid": 1}))
        assert terminal.shows(
            lambda frame: (
                "digits Running" in frame and "step 120/500" in frame and "node-0" in frame
            )
        ), terminal.frame()
        assert terminal.frame()[-1] == "Ctrl-C ends this view, not the job"
        end(folder, "stopped")
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert terminal.end() == Code.JOB_CANCELLED
        last = terminal.frame()
        assert any(line.split()[:2] == ["phase", "Suspended"] for line in last), last
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("outcome", "phase", "code"),
    [
        ("done", "Succeeded", Code.OK),
        ("failed", "Failed", Code.JOB_FAILED),
        ("stopped", "Suspended", Code.JOB_CANCELLED),
        (None, "Unknown", Code.JOB_CANCELLED),
    ],
)
def test_a_watch_ends_with_the_run_and_with_the_code_of_its_end(
    folder: Path, kdist: Kdist, outcome: str | None, phase: str, code: Code
) -> None:
    end(folder, outcome)
    watched = kdist("status", "digits", "-w")
    assert (watched.stdout.startswith(f"digits: {phase}"), watched.exit_code) == (True, code)
    document: dict[str, Any] = json.loads(kdist("status", "digits", "-w", "-o", "json").stdout)
    assert document["phase"] == phase


def test_the_end_of_a_run_is_never_taken_from_the_moment_before_it(
    folder: Path, lock: int, kdist: Kdist, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_it(_: float) -> None:
        end(folder, "failed")
        fcntl.flock(lock, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", end_it)
    assert kdist("status", "digits", "-w").exit_code == Code.JOB_FAILED


@pytest.mark.processes
def test_watched_events_fit_the_terminal(folder: Path) -> None:
    event = {"level": "info", "node": "node-0", "event": "resumed", "step": 500}
    failed = {**event, "level": "error", "event": "failed", "message": "a batch is empty " * 9}
    log = [{"time": "2026-01-31T12:00:01.500Z", **each} for each in (event, failed)]
    (folder / "node-0" / "log").write_text("".join(f"{json.dumps(each)}\n" for each in log))
    for columns in (60, 200):
        terminal = Terminal("events", "digits", "-w", columns=columns)
        try:
            assert terminal.end() == Code.OK
            lines = terminal.frame()
        finally:
            terminal.close()
        assert max(map(len, lines)) <= columns, lines
        assert [line.split()[0] for line in lines].count("TIME") == 1, lines
        assert ("OBJECT" in lines[0]) == (columns == 200)
        assert " ".join(" ".join(lines).split()).count("a batch is empty") >= 5

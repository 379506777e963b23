"""`kdist drill` of a run on this machine: real faults in a real training, and its report."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Kdist
from tests.cli.running import PATIENCE, Run, Start, commits, read_ledger, write_job

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="drills need Linux"),
]
FOREVER = 1_000_000  # steps


@pytest.fixture
def run(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A training of two nodes that has saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    found = start(write_job(tmp_path, steps=FOREVER, checkpoint=50))
    found.wait_until(lambda: commits(found.folder("digits")), "a checkpoint")
    return found


def drill(kdist: Kdist, *words: str) -> dict[str, Any]:
    done = kdist("drill", "digits", "--local", "--yes", "-o", "json", *words)
    assert done.exit_code == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def stopped(run: Run) -> list[int]:
    """The processes of the run that are stopped."""
    found = []
    for node in run.folder("digits").glob("node-*"):
        agent = json.loads((node / "agent.json").read_text())["pid"]
        stat = Path(f"/proc/{agent}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] == "T":
            found.append(agent)
    return found


@pytest.mark.sampled
def test_a_run_that_loses_a_rank_an_agent_or_a_node_keeps_every_promise(
    run: Run, kdist: Kdist
) -> None:
    preview = kdist("drill", "digits")
    assert preview.exit_code == 0
    said = {line.split()[0]: line.split()[1] for line in preview.stdout.splitlines()}
    assert said["rank"] == said["agent"] == said["pod"] == said["silence"] == "yes"
    assert set(said) == {"rank", "agent", "pod", "silence"}
    for fault in ("rank", "agent", "pod"):
        report = drill(kdist, "--fault", fault)
        assert report["kept"] is True
        assert [each["kept"] for each in report["promises"]][:3] == [True, True, True]
        assert report["generation"]["after"] > report["generation"]["before"]
    again = {each["generation"] for each in read_ledger(run.folder("digits"), "steps")}
    assert len(again) == 4
    shown = kdist("drill", "digits", "--fault", "rank", "--rank", "0", "--yes")
    assert shown.exit_code == 0, shown.stdout + shown.stderr
    assert "PROMISE" in shown.stdout
    assert "the drill kills rank 0 on node-0" in shown.stderr


@pytest.mark.sampled
def test_a_silent_node_is_waited_for_and_wakes_up_on_ctrl_c(run: Run, kdist: Kdist) -> None:
    report = drill(kdist, "--fault", "silence", "--for", "1s", "--node", "0")
    assert report["kept"] is True
    assert (report["stepsLost"], report["restarts"]) == (0, 0)
    assert report["stallSeconds"] > 0  # how long depends on when the looks are
    words = ["drill", "digits", "--local", "--fault", "silence", "--for", "10m", "--yes"]
    with subprocess.Popen([sys.executable, "-m", "kdist", *words], stderr=subprocess.PIPE) as cli:
        run.wait_until(lambda: stopped(run), "a silent node")
        second = kdist("drill", "digits", "--local", "--fault", "rank", "--yes")
        assert "refused for digits: another drill is in progress: silence (pid" in second.stderr
        assert second.exit_code == 1
        cli.send_signal(signal.SIGINT)
        assert cli.wait(PATIENCE) == 130
    assert stopped(run) == []
    seen = len(read_ledger(run.folder("digits"), "steps"))
    run.wait_until(lambda: len(read_ledger(run.folder("digits"), "steps")) > seen, "more steps")


@pytest.mark.sampled
def test_nothing_is_hurt_unless_it_is_confirmed_and_the_run_is_active(
    start: Start, kdist: Kdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KDIST_HOME", str(tmp_path / "runs"))
    run = start(write_job(tmp_path, nodes=1, steps=FOREVER, checkpoint=20))
    run.wait_until(lambda: commits(run.folder("digits")), "a checkpoint")
    asked = kdist("drill", "digits", "--local", "--fault", "agent")
    assert asked.exit_code == 2
    assert "--fault agent kills the agent of node-0 of digits, which costs" in asked.stderr
    assert "Hint: add --yes to confirm" in asked.stderr
    tried = kdist("drill", "digits", "--local", "--fault", "agent", "--dry-run=client")
    assert tried.exit_code == 0
    assert "(client dry run)" in tried.stdout
    with (run.folder("digits") / "drill.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = kdist("drill", "digits", "--local", "--fault", "agent", "--yes")
        assert "another drill is in progress" in other.stderr
    generations = [
        each
        for each in read_ledger(run.folder("digits"), "events")
        if each["event"] == "generation"
    ]
    assert len(generations) == 1
    os.kill(run.process.pid, signal.SIGINT)
    run.wait(130)
    ended = kdist("drill", "digits", "--local", "--fault", "rank", "--yes")
    assert ended.exit_code == 1
    assert "cannot be drilled: no `kdist run` is running" in ended.stderr

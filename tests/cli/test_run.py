"""`kdist run job.yaml` from outside: real agents, real ranks, real signals, a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import documents
from tests.cli.running import (
    PATIENCE,
    Start,
    Terminal,
    commits,
    processes_of,
    read_ledger,
    write_job,
)
from tests.patience import soon


@pytest.mark.processes
def test_a_job_on_two_nodes_trains_to_its_end_and_reports(start: Start, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    run = start(job, "-o", "json")
    report = json.loads(run.wait(0))
    folder = run.folder("digits")
    assert report["outcome"] == "done"
    assert report["steps"] == {"reached": 24, "committed": 24, "lost": 0, "samples": 24 * 32}
    assert report["restarts"]["total"] == 0
    assert 0 < report["goodput"] <= 1
    assert 0 < report["metrics"]["accuracy"] <= 1
    assert report["loss"] == float.fromhex(read_ledger(folder, "steps")[-1]["loss"])
    assert report.pop("error") is None
    assert json.loads((folder / "report.json").read_text()) == report
    lines = run.errors().splitlines()
    events = [
        found[1]
        for line in lines
        if (found := re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \S+ ([a-z-]+) +\S", line))
    ]
    assert [name for name in events if name in ("rendezvous-completed", "first-step", "done")] == [
        "rendezvous-completed",
        "first-step",
        "done",
    ]
    assert events.count("agent-started") == 2
    assert "\x1b" not in run.errors()
    assert processes_of(folder) == []
    assert (folder / "checkpoints" / "tensorboard").is_dir()
    closed = [*folder.glob("node-*/**/*"), *folder.glob("rendezvous-*/**/*")]  # below 0700
    written = [path for path in (folder, *folder.rglob("*")) if path not in closed]
    readable = [path for path in written if path.lstat().st_mode & 0o077]
    assert readable == [], "arguments, losses and logs are the user's alone"

    again = start(job)
    assert "done" in again.wait(0)
    assert "digits is done already" in again.errors()
    assert len(read_ledger(folder, "steps")) == 24

    detached = start(job, "-d", "-o", "json")
    (document,) = documents.read(detached.wait(0))
    assert (document["kind"], document["job"]) == ("DetachedRun", "digits")
    assert document["pid"] is document["log"] is None
    assert "digits is done already" in detached.errors()

    edited = start(job, "--set", "spec.train.optimizer.learningRate=0.5")
    assert edited.wait(10) == "", "no old report"
    assert "the job was edited since: optimizer.learningRate 0.001 -> 0.5" in edited.errors()

    longer = start(job, "--set", "spec.train.steps=26", "-o", "json")
    assert json.loads(longer.wait(0))["steps"]["reached"] == 26
    assert (
        "job-edited            the job was edited since its checkpoint: steps 24 -> 26: taken over"
        in longer.errors()
    )


@pytest.mark.sampled
@pytest.mark.processes
def test_ctrl_c_saves_the_next_run_goes_on_alone_and_its_death_ends_everything(
    start: Start, tmp_path: Path
) -> None:
    job = write_job(tmp_path, steps=100_000, checkpoint=100_000)
    run = start(job)
    folder = run.folder("digits")
    run.wait_until(lambda: len(read_ledger(folder, "steps")) > 5, "first steps")
    run.process.send_signal(signal.SIGINT)
    run.wait(130)
    saved = commits(folder)[-1]
    assert (
        f"digits stopped; step {saved:,} is saved. Next: kdist run job.yaml   continues from there"
        in run.errors()
    )
    assert json.loads((folder / "report.json").read_text())["outcome"] == "stopped"

    run = start(job)
    run.wait_until(lambda: len(resumed(folder)) >= 5, "steps of the next run")
    assert resumed(folder)[:5] == list(range(saved + 1, saved + 6))
    second = subprocess.run(
        [sys.executable, "-m", "kdist", "run", job],
        cwd=tmp_path,
        env={**os.environ, "KDIST_HOME": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert f"another kdist run (pid {run.process.pid}) is active in {folder}" in second.stderr

    assert len(processes_of(folder)) >= 4, "two agents and two ranks"
    run.process.kill()
    assert soon(lambda: not processes_of(folder)), processes_of(folder)


@pytest.mark.processes
def test_a_second_ctrl_c_that_comes_after_the_agents_have_ended_costs_no_word_of_the_end(
    start: Start, tmp_path: Path
) -> None:
    run = start(write_job(tmp_path))
    folder = run.folder("digits")
    run.wait_until(lambda: run.errors().count("agent-started") == 2, "agents")
    ledger = folder / "checkpoints" / "ledger" / "events.jsonl"
    ledger.parent.mkdir()
    os.mkfifo(ledger)  # whoever writes the end report waits for us
    run.process.send_signal(signal.SIGINT)

    def outcome() -> object:
        return json.loads((folder / "run.json").read_text())["invocations"][-1]["outcome"]

    run.wait_until(lambda: outcome() == "stopped", "end of the agents")
    run.process.send_signal(signal.SIGINT)

    def is_read() -> bool:
        with contextlib.suppress(OSError):  # not yet
            os.close(os.open(ledger, os.O_WRONLY | os.O_NONBLOCK))
            return True
        return False

    run.wait_until(is_read, "the end report")
    run.wait(130)
    assert "digits stopped; nothing was saved yet. Next: kdist run job.yaml" in run.errors()


def resumed(folder: Path) -> list[int]:
    """Steps of the second generation."""
    return [line["step"] for line in read_ledger(folder, "steps") if line["generation"] == 2]


@pytest.mark.sampled
@pytest.mark.processes
def test_on_a_terminal_the_job_is_seen_live(start: Start, tmp_path: Path) -> None:
    job = write_job(tmp_path, nodes=1, steps=150)
    with Terminal() as terminal:
        run = start(job, stderr=terminal.theirs)
        terminal.close_theirs()
        assert soon(lambda: terminal.text() and run.process.poll() is not None, PATIENCE), (
            terminal.text()
        )
        text = terminal.text()
    run.wait(0)
    for part in (
        "… starting: 1 of 1 agents",
        "━",
        "/150",
        "loss ",
        "learning rate",
        "NODE",
        "Ctrl-C saves and stops",
    ):
        assert part in text, text
    assert "rendezvous-completed" not in text, "the live view tells sentences, not names of events"


@pytest.mark.sampled
@pytest.mark.processes
def test_an_agent_that_is_killed_is_started_again_and_the_training_ends_well(
    start: Start, tmp_path: Path
) -> None:
    job = write_job(tmp_path, steps=80, checkpoint=20)
    run = start(job, "-o", "json")
    folder = run.folder("digits")
    run.wait_until(lambda: len(commits(folder)) >= 1, "checkpoint")
    os.kill(json.loads((folder / "node-1" / "agent.json").read_text())["pid"], signal.SIGKILL)
    report = json.loads(run.wait(0))
    expected = {"total": 1, "byCause": {"node_lost": 1}, "joins": 0, "generations": 2}
    assert report["restarts"] == expected
    assert len(report["recoverySeconds"]) == 1
    assert re.search(
        r"node-1 agent-restarting +agent ended by signal 9; starts again in 0.5 s", run.errors()
    )
    effective = {line["step"]: line for line in read_ledger(folder, "steps")}
    assert sorted(effective) == list(range(1, 81))


@pytest.mark.sampled
@pytest.mark.processes
def test_a_reader_that_stops_reading_stops_neither_healing_nor_ctrl_c(
    start: Start, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    job = write_job(tmp_path, steps=100_000, checkpoint=10)
    run = start(job, stderr=writer)
    os.close(writer)
    folder = run.folder("digits")
    run.wait_until(lambda: commits(folder), "checkpoint")
    os.kill(json.loads((folder / "node-1" / "agent.json").read_text())["pid"], signal.SIGKILL)
    run.wait_until(
        lambda: read_ledger(folder, "steps")[-1]["generation"] == 2, "the second generation's steps"
    )
    run.process.send_signal(signal.SIGINT)
    run.wait_until((folder / "report.json").exists, "the end report")
    assert json.loads((folder / "report.json").read_text())["outcome"] == "stopped"
    assert run.process.poll() is None, "what it has to say last waits for the reader"
    os.close(reader)
    run.wait(130)
    assert soon(lambda: not processes_of(folder)), processes_of(folder)


@pytest.mark.sampled
@pytest.mark.processes
def test_a_disk_that_is_full_when_the_job_is_stopped_ends_it_with_10_and_words(
    start: Start, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    (tmp_path / "runs").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "kdist-test", str(tmp_path / "runs")], check=True
    )
    try:
        run = start(write_job(tmp_path, nodes=1, steps=100_000, checkpoint=100_000), "-o", "json")
        run.wait_until(lambda: len(read_ledger(run.folder("digits"), "steps")) > 5, "first steps")
        with (
            (tmp_path / "runs" / "ballast").open("wb", buffering=0) as ballast,
            contextlib.suppress(OSError),
        ):
            while ballast.write(bytes(4096)):
                pass
        run.process.send_signal(signal.SIGINT)
        report = json.loads(run.wait(10))
        assert (report["outcome"], report["trainerExitCode"]) == ("stopped", 203)
        assert re.search(
            r"report-not-kept +the end report cannot be written to \S+: No space left on device",
            run.errors(),
        )
        assert "Error:" in run.errors()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "runs")], check=True)

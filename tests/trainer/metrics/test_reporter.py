"""Sending never blocks: whatever happens to the reader, the training continues."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer import Reporter
from kdist_trainer.metrics.rank_metrics import WALL_CATEGORIES, StepStats
from kdist_trainer.metrics.transport import CLOSE_SECONDS, GAUGES, SLOTS, Record, unpack
from kdist_trainer.processes.liveness import Heartbeat, Phase

STEPS = SLOTS["kdist_steps_total"].start
DROPPED = SLOTS["kdist_exporter_records_dropped_total"].start


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "metrics.sock"
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(path))
    monkeypatch.setattr("kdist_trainer.metrics.transport._shared", [])  # as in a new process
    return path


@pytest.fixture
def agent(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(path))
        agent.setblocking(False)
        yield agent


def received(agent: socket.socket) -> list[Record]:
    records = []
    while True:
        try:
            records.append(unpack(agent.recv(2048)))
        except BlockingIOError:
            return records


def test_a_full_socket_drops_records_and_the_next_one_counts_them(agent: socket.socket) -> None:
    stats = StepStats(rank=3, generation=2)
    reporter = Reporter(stats, min_interval_seconds=0)
    for step in range(1000):
        stats.add_step(0.01, 1, step)
        reporter.send()
    held = received(agent)
    assert 0 < len(held) < 1000
    reporter.send()
    (last,) = received(agent)
    assert (last.rank, last.generation, last.counters[STEPS]) == (3, 2, 1000)
    assert last.counters[DROPPED] == 1000 - len(held) == stats.dropped


def test_without_an_agent_nothing_is_sent_and_nothing_fails(path: Path) -> None:
    stats = StepStats()
    reporter = Reporter(stats, min_interval_seconds=0)
    for _ in range(10):
        reporter.send()
    reporter.close()
    assert stats.dropped >= 10


def test_an_agent_that_restarts_gets_the_cumulative_counters(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist_trainer.metrics.transport._RECONNECT_SECONDS", 0.0)
    stats = StepStats()
    reporter = Reporter(stats, min_interval_seconds=0)
    for life in (1, 2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
            agent.bind(str(path))
            agent.setblocking(False)
            for step in range(3):
                stats.add_step(0.01, 1, step)
                reporter.send()
            assert received(agent)[-1].counters[STEPS] == life * 3
        path.unlink()
        reporter.send()
    assert stats.dropped > 0
    reporter.close()


def test_records_respect_the_minimum_interval_and_the_last_one_is_always_sent(
    agent: socket.socket,
) -> None:
    stats = StepStats()
    reporter = Reporter(stats, min_interval_seconds=3600)
    for step in range(100):
        stats.add_step(0.01, 1, step)
        reporter.send()
    assert len(received(agent)) == 1
    reporter.flush()
    assert [record.counters[STEPS] for record in received(agent)] == [100]
    stats.add_step(0.01, 1, 100)
    reporter.send()
    assert received(agent) == []
    reporter.close()
    assert received(agent)[-1].counters[STEPS] == 101


def test_a_number_that_cannot_be_packed_costs_one_record(agent: socket.socket) -> None:
    stats = StepStats()
    reporter = Reporter(stats, min_interval_seconds=0)
    stats.loss = "much"  # type: ignore[assignment]
    reporter.send()
    assert (received(agent), stats.dropped) == ([], 1)
    reporter.close()


def test_outside_kdist_a_reporter_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KDIST_METRICS_SOCKET", raising=False)
    with Reporter() as reporter:
        before = reporter.stats.steps  # of this process, which may have trained before
        reporter.step(loss=1.0, samples=4)
    assert reporter.stats.steps == before
    assert capfd.readouterr().err == ""


def test_a_script_reports_steps_heartbeats_and_progress(
    agent: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KDIST_SCRATCH", str(tmp_path))
    monkeypatch.setenv("KDIST_GENERATION", "4")
    monkeypatch.setenv("RANK", "0")
    heartbeat = Heartbeat.create(tmp_path / "rank-0.heartbeat")
    with Reporter() as reporter:
        for loss in (2.0, float("nan")):
            reporter.step(loss=loss, samples=8, learning_rate=0.1, grad_norm=1.0, target_steps=9)
        reporter.step(samples=8, step=40)
    last = received(agent)[-1]
    assert last.generation == 4
    assert last.counters[STEPS] == 3
    assert last.counters[SLOTS["kdist_samples_total"].start] == 24
    assert last.counters[SLOTS["kdist_nonfinite_total"]] == (1.0, 0.0)
    assert last.counters[SLOTS["kdist_step_duration_seconds"].stop - 1] > 0
    beat = heartbeat.read()
    assert (beat.count, beat.phase, beat.step, beat.pid) == (3, Phase.STEP, 40, os.getpid())
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"] for line in lines][:2] == ["first-step", "progress"]
    assert (lines[1]["step"], lines[1]["target"], lines[1]["loss"]) == (1, 9, 2.0)


def test_a_loss_that_is_not_finite_is_said_at_once_and_once(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(StepStats(rank=1))
    for step, loss in enumerate((1.0, math.nan, math.nan, 1.0, math.inf, math.inf), start=10):
        reporter.step(step=step, loss=loss)
    reporter.close()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    said = [(one["step"], one["loss"]) for one in lines if one["event"] == "loss-not-finite"]
    assert said == [(11, "nan"), (14, "inf")]


def test_an_evaluation_is_reported_with_its_loss_its_time_and_a_heartbeat(
    agent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_SCRATCH", str(tmp_path))
    beat = tmp_path / "rank-0.heartbeat"
    Heartbeat.create(beat)
    reporter = Reporter(min_interval_seconds=0)
    reporter.begin(Phase.EVALUATE)
    assert Heartbeat(beat).read().count == 0, "who has reported no step is not watched"
    reporter.step(step=7, samples=1)
    reporter.update(loss=0.5, learning_rate=0.1)
    reporter.begin(Phase.EVALUATE)
    assert (Heartbeat(beat).read().phase, Heartbeat(beat).read().step) == (Phase.EVALUATE, 7)
    reporter.evaluated({"loss": 0.25, "accuracy": 0.75})
    reporter.close()
    last = received(agent)[-1]
    assert last.counters[STEPS] == 1, "an update is no step"
    assert last.gauges[GAUGES["kdist_loss"]] == 0.5
    assert last.gauges[GAUGES["kdist_evaluation_loss"]] == 0.25
    wall = SLOTS["kdist_wall_seconds_total"].start + WALL_CATEGORIES.index("evaluation")
    assert last.counters[wall] > 0


def test_a_script_that_never_closes_its_reporter_still_sends_a_last_record(
    agent: socket.socket, path: Path
) -> None:
    code = (
        "from kdist_trainer import Reporter\nr = Reporter(min_interval_seconds=3600)\nfor _ "
        "in range(5): r.step(samples=1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    assert received(agent)[-1].counters[STEPS] == 5


@pytest.mark.processes
def test_a_stopped_reader_never_blocks_the_sender(path: Path) -> None:
    code = """
import socket, sys
reader = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
reader.bind(sys.argv[1])
sys.stdout.write("ready\\n")
sys.stdout.flush()
while True:
    reader.recv(2048)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE
    ) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
            reader.send_signal(signal.SIGSTOP)
            os.waitpid(reader.pid, os.WUNTRACED)
            stats = StepStats()
            reporter = Reporter(stats, min_interval_seconds=0)
            for _ in range(20_000):  # a single one that waited would wait for ever
                reporter.send()
            assert stats.dropped > 19_000
            began = time.monotonic()
            reporter.close()
            assert CLOSE_SECONDS * 0.9 <= time.monotonic() - began < CLOSE_SECONDS + 30
        finally:
            reader.kill()


@pytest.mark.processes
def test_closing_waits_for_a_reader_that_resumes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist_trainer.metrics.transport.CLOSE_SECONDS", 60.0)
    code = """
import os, signal, socket, sys
from kdist_trainer.metrics.transport import SLOTS, unpack
reader = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
reader.bind(sys.argv[1])
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
steps = 0
while steps < 100:
    steps = unpack(reader.recv(2048)).counters[SLOTS["kdist_steps_total"].start]
sys.stdout.write("got all\\n")
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == b"ready\n"
        stats = StepStats()
        reporter = Reporter(stats, min_interval_seconds=0)
        for step in range(100):
            stats.add_step(0.01, 1, step)
            reporter.send()
        assert stats.dropped > 0
        reader.stdin.write(b"\n")
        reader.stdin.flush()
        reporter.close()
        assert reader.stdout.readline() == b"got all\n"

"""Ranks report over real sockets to a listening exporter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.agent.restart_policy import count_restarts
from kdist_trainer.config.train_config import RESTARTS
from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.metrics.rank_metrics import StepPhase, StepStats
from kdist_trainer.metrics.transport import Reporter, pack
from kdist_trainer.processes.liveness import Heartbeat, Phase
from tests.trainer.metrics.scrape import (
    counters,
    exporting,
    fetch,
    full_stats,
    make_exporter,
    read,
    send_raw,
    total,
    value,
    wait_until,
)


def train(stats: StepStats, steps: int, send: Callable[[], None]) -> None:
    for step in range(1, steps + 1):
        stats.add_step(0.02, 8, step)
        stats.phase[StepPhase.FORWARD] += 0.02
        stats.add_all_reduces(busy=0.001, exposed=0.0, nbytes=64, durations=[0.001])
        send()


def test_with_half_of_the_records_lost_the_totals_are_exact(exporter: Exporter) -> None:
    chance = random.Random(0)
    for rank in (0, 1):
        stats = StepStats(rank=rank, generation=1)
        reporter = Reporter(stats, min_interval_seconds=0)
        train(stats, 400, lambda: reporter.send() if chance.random() < 0.5 else None)  # noqa: B023
        reporter.close()
    samples = read(fetch(exporter.port, "/metrics")[1])
    assert total(samples, "kdist_steps_total") == 800
    assert total(samples, "kdist_samples_total") == 6400
    assert total(samples, "kdist_collectives_total") == 800
    assert total(samples, "kdist_collective_bytes_total") == 800 * 64
    assert value(samples, "kdist_step_duration_seconds_count") == 800
    assert value(samples, "kdist_allreduce_duration_seconds_count") == 800
    assert total(samples, "kdist_step_phase_seconds_total") == pytest.approx(
        value(samples, "kdist_step_duration_seconds_sum")
    )
    assert total(samples, "kdist_exporter_records_total", outcome="accepted") < 500


def test_every_counter_only_grows_over_generations_that_renumber_the_ranks(
    exporter: Exporter,
) -> None:
    shown = counters(read(exporter.expose()))
    for generation, ranks in enumerate([[0, 1], [1, 2], [2, 3], [0, 1], [0, 1]], start=2):
        exporter.add_restart("signal")
        exporter.set_group(generation=generation, world_size=4, local_ranks=ranks)
        for rank in ranks:
            Reporter(full_stats(rank, generation)).close()
            Reporter(full_stats(rank, generation - 1)).close()
        samples = counters(read(exporter.expose()))
        assert {dict(labels)["rank"] for _, labels in samples if "rank" in dict(labels)} == {
            str(rank) for rank in ranks
        }
        assert [key for key, number in samples.items() if number < shown.get(key, 0)] == []
        assert total(samples, "kdist_steps_total") == 2 * (generation - 1)
        shown = {**shown, **samples}
    assert total(shown, "kdist_exporter_records_total", outcome="stale") == 10


def test_the_last_records_of_a_dying_group_still_count(exporter: Exporter) -> None:
    for rank in (0, 1):
        Reporter(full_stats(rank)).close()
    exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
    assert total(read(exporter.expose()), "kdist_steps_total") == 2


def test_a_committed_checkpoint_resets_the_remaining_restarts(exporter: Exporter) -> None:
    def left() -> float:
        return value(read(exporter.expose()), "kdist_restarts_remaining")

    exporter.set_restarts_remaining(2, budget=10)
    stats = StepStats(rank=0, generation=1)
    reporter = Reporter(stats)
    stats.add_step(0.1, 8, 1)
    reporter.send()
    assert left() == 2
    stats.add_checkpoint("save", nbytes=8, step=1)
    reporter.send()
    reporter.close()
    failure: dict[str, Any] = {"event": "generation", "reason": "failure"}
    events = [failure, {"event": "commit", "step": 1}]
    assert left() == 10 - count_restarts(events)[RESTARTS] == 10
    exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
    exporter.set_restarts_remaining(9, budget=10)
    assert left() == 9, "what was committed before this failure has been counted"


def test_restarts_and_lost_steps_are_those_of_the_run(exporter: Exporter) -> None:
    def counts() -> tuple[int, int]:
        status = exporter.status()
        return status["restarts"], status["lost_steps"]

    exporter.add_restart("signal")
    exporter.add_lost_steps(4)
    assert counts() == (1, 4), "until a group begins, what this node has counted"
    exporter.run_counts.begin(restarts=7, lost_steps=90, committed=(None, None))
    assert counts() == (7, 90)
    exporter.add_restart("signal")
    assert counts() == (8, 90), "its next group will be one more"
    exporter.set_exit_record({"outcome": "failed"})
    assert counts() == (7, 90), "there is none"


def test_the_last_checkpoint_is_the_newest_one_as_a_group_begins_until_it_saves(
    exporter: Exporter,
) -> None:
    def shown() -> tuple[int | None, float | None]:
        status = exporter.status()
        return status["last_checkpoint_step"], status["last_checkpoint_time"]

    def begin(generation: int, *, ranks: list[int], committed: tuple[int, float]) -> None:
        exporter.run_counts.begin(restarts=0, lost_steps=0, committed=committed)
        exporter.set_group(generation=generation, world_size=2, local_ranks=ranks)

    begin(2, ranks=[0], committed=(40, 1000.5))
    assert shown() == (40, 1000.5)
    stats = StepStats(rank=0, generation=2)
    stats.add_step(0.1, 8, 41)
    Reporter(stats).close()
    assert shown() == (40, 1000.5), "a rank that has not saved knows of none"
    stats.add_checkpoint("save", nbytes=8, step=50)
    Reporter(stats).close()
    assert shown()[0] == 50
    begin(3, ranks=[0], committed=(45, 1100.0))
    assert shown() == (45, 1100.0), "the one of step 50 is gone"
    begin(4, ranks=[1], committed=(45, 1100.0))
    assert shown() == (None, None), "rank 0 is on another node"


def test_wall_time_sums_to_the_time_since_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(tmp_path / "metrics.sock"))
    before = time.monotonic()
    with exporting(tmp_path) as exporter:
        begun = time.monotonic()
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        exporter.set_state("running")
        stats = StepStats(rank=0, generation=1)
        reporter = Reporter(stats)
        for step in range(5):
            started = time.monotonic()
            wait_until(lambda: time.monotonic() - started > 0.1)  # noqa: B023
            stats.add_step(time.monotonic() - started, 1, step)
            reporter.send()
        reporter.close()
        least = time.monotonic() - begun
        samples = read(exporter.expose())
        most = time.monotonic() - before
    elapsed = total(samples, "kdist_wall_seconds_total")
    assert least * 0.99 <= elapsed <= most * 1.01
    assert value(samples, "kdist_wall_seconds_total", category="productive_step") >= 0.5


def test_the_time_to_the_first_step_and_to_recover_are_found_from_the_records(
    exporter: Exporter,
) -> None:
    Reporter(full_stats(0)).close()
    assert ("kdist_time_to_recover_seconds", frozenset()) not in read(exporter.expose())
    exporter.add_restart("signal")
    exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
    second = full_stats(0, generation=2)
    second.started_ns -= 5_000_000_000
    Reporter(second).close()
    samples = read(exporter.expose())
    assert 5.0 <= value(samples, "kdist_time_to_first_step_seconds") < 65.0
    assert 0.0 <= value(samples, "kdist_time_to_recover_seconds") < 60.0


def test_lost_progress_is_the_lost_steps_times_the_step_time_before(exporter: Exporter) -> None:
    Reporter(full_stats(0)).close()
    exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
    exporter.add_lost_steps(30)
    samples = read(exporter.expose())
    assert value(samples, "kdist_lost_steps_total") == 30
    assert value(samples, "kdist_lost_progress_seconds_total") == pytest.approx(30 * 0.02)


def test_a_closed_exporter_still_exposes_its_metrics(tmp_path: Path) -> None:
    with exporting(tmp_path) as exporter:
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        send_raw(exporter.socket_path, pack(full_stats(0)))
    exporter.close()
    assert total(read(exporter.expose()), "kdist_steps_total") == 1
    assert exporter.status()["step"] == 100


def test_status_shows_each_local_rank_with_its_heartbeat(
    exporter: Exporter, tmp_path: Path
) -> None:
    Heartbeat.create(tmp_path / "rank-1.heartbeat")
    Heartbeat.attach(tmp_path / "rank-1.heartbeat").beat(Phase.SAVE, 7)
    Reporter(full_stats(1)).close()
    first, second = exporter.status()["ranks"]
    assert first["rank"] == 0
    assert first["step"] is None
    assert first["phase"] is None
    assert first["heartbeat_age"] is None
    assert second["rank"] == 1
    assert second["local_rank"] == 1
    assert second["step"] == 100
    assert second["phase"] == "save"
    assert second["busy_seconds"] == pytest.approx(4 * 0.003)
    assert 0 <= second["heartbeat_age"] < 60


def test_throughput_covers_the_last_seconds(exporter: Exporter) -> None:
    assert exporter.status()["samples_per_second"] is None
    stats = StepStats(rank=0, generation=1)
    reporter = Reporter(stats, min_interval_seconds=0)
    began = time.monotonic()
    while exporter.status()["samples_per_second"] is None:
        stats.add_step(0.01, 100, 1)
        reporter.send()
        assert time.monotonic() - began < 60
    assert 0 < exporter.status()["samples_per_second"] <= 100 * stats.steps / 0.5
    reporter.close()


def test_an_exporter_accepts_metrics_before_its_start(tmp_path: Path) -> None:
    exporter = make_exporter(tmp_path)
    exporter.set_group(generation=1, world_size=1, local_ranks=[0])
    exporter.close()
    assert exporter.status()["generation"] == 1


def test_a_counter_cannot_be_decremented(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be incremented by -1"):
        make_exporter(tmp_path).add_lost_steps(-1)

"""Counters outlive their agent: the next one of the same place goes on from what was last shown."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.metrics.persistence import CounterState, place, read
from kdist_trainer.metrics.reporter import Reporter
from tests.trainer.metrics.scrape import INFO, Samples, counters, fetch, full_stats, tell_all, total
from tests.trainer.metrics.scrape import read as parse
from tests.trainer.metrics.training import TrainingRun, training

OF_ONE_LIFE = ("kdist_exporter_records", "kdist_exporter_scrape")


@contextmanager
def agent_at(kept: Path, scratch: Path, *, run_id: str = "r1") -> Iterator[Exporter]:
    exporter = Exporter(
        job="digits",
        run_id=run_id,
        socket_path=scratch / "metrics.sock",
        port=0,
        host="127.0.0.1",
        info=INFO,
        kept=kept,
    )
    exporter.start()
    try:
        yield exporter
    finally:
        exporter.close()


def shown(exporter: Exporter) -> Samples:
    return counters(parse(fetch(exporter.port, "/metrics")[1]))


def check_nothing_went_back(before: Samples, after: Samples) -> None:
    """No series that is still there is less; a rank's series ends where the rank went elsewhere."""
    lasting = {key: number for key, number in before.items() if not key[0].startswith(OF_ONE_LIFE)}
    assert [key for key, number in lasting.items() if after.get(key, math.inf) < number] == []


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(tmp_path / "metrics.sock"))
    return tmp_path


def live(exporter: Exporter, generation: int, ranks: tuple[int, ...]) -> None:
    """One generation in the life of an agent: its ranks report, things happen."""
    exporter.set_group(generation=generation, world_size=2, local_ranks=ranks)
    exporter.set_state("running")
    tell_all(exporter)
    for rank in ranks:
        Reporter(full_stats(rank, generation)).close()


def test_no_counter_goes_back_when_an_agent_follows_another(scratch: Path) -> None:
    kept, before = scratch / "kept" / "sums.json", Samples()
    for generation, ranks in enumerate([(0, 1), (1, 2), (0, 1)], start=1):
        with agent_at(kept, scratch) as exporter:
            live(exporter, generation, ranks)
            after = shown(exporter)
        check_nothing_went_back(before, after)
        before = after
    assert total(before, "kdist_steps_total") == 6
    assert total(before, "kdist_worker_group_restarts_total") == 3
    assert total(before, "kdist_lost_steps_total") == 9
    assert total(before, "kdist_step_duration_seconds_count") == 6


def test_what_was_shown_is_kept_before_it_is_shown(scratch: Path) -> None:
    kept = scratch / "sums.json"
    with agent_at(kept, scratch) as exporter:
        live(exporter, 1, (0, 1))
        before = shown(exporter)
        # as if the agent were killed right now
        kept.with_suffix(".copy").write_bytes(kept.read_bytes())
    kept.write_bytes(kept.with_suffix(".copy").read_bytes())
    with agent_at(kept, scratch) as exporter:
        exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
        check_nothing_went_back(before, shown(exporter))


def test_an_agent_that_never_finds_a_group_keeps_what_it_was_given(scratch: Path) -> None:
    kept = scratch / "sums.json"
    with agent_at(kept, scratch) as exporter:
        live(exporter, 1, (0, 1))
        before = shown(exporter)
    with agent_at(kept, scratch) as exporter:
        exporter.set_state("rendezvous")
        shown(exporter)
    with agent_at(kept, scratch) as exporter:
        exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
        after = shown(exporter)
    check_nothing_went_back(before, after)
    assert total(after, "kdist_steps_total") == 2


def test_wall_time_goes_on_and_still_sums_to_the_lives_of_all_agents(scratch: Path) -> None:
    kept, least, most = scratch / "sums.json", 0.0, 0.0
    for generation in (1, 2, 3):
        begun = time.monotonic()
        with agent_at(kept, scratch) as exporter:
            started = time.monotonic()
            live(exporter, generation, (0, 1))
            least += time.monotonic() - started
            sum_of_all = total(shown(exporter), "kdist_wall_seconds_total")
            assert least <= sum_of_all <= most + time.monotonic() - begun
        most += time.monotonic() - begun


def test_another_run_begins_at_zero(scratch: Path) -> None:
    kept = scratch / "sums.json"
    with agent_at(kept, scratch) as exporter:
        live(exporter, 1, (0, 1))
    with agent_at(kept, scratch, run_id="r2") as exporter:
        exporter.set_group(generation=1, world_size=2, local_ranks=[0, 1])
        assert total(shown(exporter), "kdist_steps_total") == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"layout": 1, "run_id": "r1"}',
        {"ranks": [[1.0]]},
        {"leader": ["x"]},
        {"wall": [-1.0] * 11},
        {"wall": [float("nan")] * 11},
        {"agent": {"kdist_nothing_total": []}},
        {"agent": {"kdist_lost_steps_total": [[["too", "many"], [1.0]]]}},
        {"agent": {"kdist_lost_steps_total": [[[], [1.0, 2.0]]]}},
        {"agent": 7},
    ],
    ids=str,
)
def test_what_is_damaged_is_left_aside(scratch: Path, damage: bytes | dict[str, object]) -> None:
    kept = scratch / "sums.json"
    with agent_at(kept, scratch) as exporter:
        live(exporter, 1, (0, 1))
    if isinstance(damage, bytes):
        kept.write_bytes(damage)
    else:
        kept.write_text(json.dumps({**json.loads(kept.read_text()), **damage}))
    assert read(kept, run_id="r1") == CounterState()
    with agent_at(kept, scratch) as exporter:
        exporter.set_group(generation=1, world_size=2, local_ranks=[0, 1])
        assert total(shown(exporter), "kdist_steps_total") == 0


def test_storage_that_hangs_or_refuses_holds_up_no_scrape(
    scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(scratch / "hangs.new")  # opening it to write waits for a reader that never comes
    (scratch / "file").write_text("")
    for kept in (scratch / "hangs.json", scratch / "file" / "sums.json"):
        with agent_at(kept, scratch) as exporter:
            live(exporter, 1, (0, 1))
            begun = time.monotonic()
            assert total(shown(exporter), "kdist_steps_total") == 2
            assert time.monotonic() - begun < 5
    assert capfd.readouterr().err.count('"event":"counters-not-persisted"') == 1


def test_a_pod_of_an_indexed_job_has_its_place_by_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    assert place(tmp_path, run_id="r", node="a-0-xyz") != place(
        tmp_path, run_id="r", node="a-0-abc"
    )
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    first = place(tmp_path, run_id="r", node="a-0-xyz")
    assert first == place(tmp_path, run_id="r", node="a-0-abc")
    assert first != place(tmp_path, run_id="other", node="a-0-abc")


@pytest.mark.processes
def test_counters_outlive_a_killed_agent(tmp_path: Path) -> None:
    with training(tmp_path, steps=100_000, checkpoint_steps=20) as run:
        run.wait_for_step(40)
        before = counters(parse(fetch(run.port(), "/metrics")[1]))
        os.killpg(run.agent.pid, signal.SIGKILL)
        run.agent.wait()
        (run.scratch / "agent.json").unlink()
        again = TrainingRun(tmp_path, steps=100_000, checkpoint_steps=20)
        try:
            after = counters(parse(fetch(again.port(), "/metrics")[1]))
        finally:
            os.killpg(again.agent.pid, signal.SIGKILL)
            again.agent.wait()
    check_nothing_went_back(before, after)
    assert total(before, "kdist_steps_total") > 0
    assert total(after, "kdist_wall_seconds_total") >= total(before, "kdist_wall_seconds_total")

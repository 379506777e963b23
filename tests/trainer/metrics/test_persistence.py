"""Counters survive their agent: its replacement continues from what was last scraped."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.metrics.metric import Kind, Metric, Scope
from kdist_trainer.metrics.persistence import CounterState, counters_path, read_counters
from kdist_trainer.metrics.transport import Reporter, digest_layout
from tests.trainer.metrics.scrape import (
    INFO,
    Samples,
    counters,
    fetch,
    full_stats,
    record_everything,
    total,
)
from tests.trainer.metrics.scrape import read as parse
from tests.trainer.metrics.training import TrainingRun, training

OF_ONE_LIFE = ("kdist_exporter_records", "kdist_exporter_scrape")


@contextmanager
def agent_at(path: Path, scratch: Path, *, run_id: str = "r1") -> Iterator[Exporter]:
    exporter = Exporter(
        job="digits",
        run_id=run_id,
        socket_path=scratch / "metrics.sock",
        port=0,
        addresses=["127.0.0.1"],
        info=INFO,
        counters_path=path,
    )
    exporter.start()
    try:
        yield exporter
    finally:
        exporter.close()


def shown(exporter: Exporter) -> Samples:
    return counters(parse(fetch(exporter.port, "/metrics")[1]))


def check_nothing_went_back(before: Samples, after: Samples) -> None:
    """No remaining series has decreased; the series of a rank that moved away have ended."""
    lasting = {key: number for key, number in before.items() if not key[0].startswith(OF_ONE_LIFE)}
    assert [key for key, number in lasting.items() if after.get(key, math.inf) < number] == []


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(tmp_path / "metrics.sock"))
    return tmp_path


def live(exporter: Exporter, generation: int, ranks: tuple[int, ...]) -> None:
    """Run one generation of an agent, in which its ranks report."""
    exporter.set_group(generation=generation, world_size=2, local_ranks=ranks)
    exporter.set_state("running")
    record_everything(exporter)
    for rank in ranks:
        Reporter(full_stats(rank, generation)).close()


def test_no_counter_goes_back_when_an_agent_is_replaced(scratch: Path) -> None:
    path, before = scratch / "kept" / "sums.json", Samples()
    for generation, ranks in enumerate([(0, 1), (1, 2), (0, 1)], start=1):
        with agent_at(path, scratch) as exporter:
            live(exporter, generation, ranks)
            after = shown(exporter)
        check_nothing_went_back(before, after)
        before = after
    assert total(before, "kdist_steps_total") == 6
    assert total(before, "kdist_worker_group_restarts_total") == 3
    assert total(before, "kdist_lost_steps_total") == 9
    assert total(before, "kdist_step_duration_seconds_count") == 6


def test_counters_are_persisted_before_they_are_scraped(scratch: Path) -> None:
    path = scratch / "sums.json"
    with agent_at(path, scratch) as exporter:
        live(exporter, 1, (0, 1))
        before = shown(exporter)
        # as if the agent were killed right now
        path.with_suffix(".copy").write_bytes(path.read_bytes())
    path.write_bytes(path.with_suffix(".copy").read_bytes())
    with agent_at(path, scratch) as exporter:
        exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
        check_nothing_went_back(before, shown(exporter))


def test_an_agent_without_a_worker_group_preserves_the_counters(scratch: Path) -> None:
    path = scratch / "sums.json"
    with agent_at(path, scratch) as exporter:
        live(exporter, 1, (0, 1))
        before = shown(exporter)
    with agent_at(path, scratch) as exporter:
        exporter.set_state("rendezvous")
        shown(exporter)
    with agent_at(path, scratch) as exporter:
        exporter.set_group(generation=2, world_size=2, local_ranks=[0, 1])
        after = shown(exporter)
    check_nothing_went_back(before, after)
    assert total(after, "kdist_steps_total") == 2


def test_wall_time_continues_and_adds_up_to_the_lifetimes_of_all_agents(scratch: Path) -> None:
    path, least, most = scratch / "sums.json", 0.0, 0.0
    for generation in (1, 2, 3):
        begun = time.monotonic()
        with agent_at(path, scratch) as exporter:
            started = time.monotonic()
            live(exporter, generation, (0, 1))
            least += time.monotonic() - started
            sum_of_all = total(shown(exporter), "kdist_wall_seconds_total")
            assert least <= sum_of_all <= most + time.monotonic() - begun
        most += time.monotonic() - begun


def test_another_run_starts_at_zero(scratch: Path) -> None:
    path = scratch / "sums.json"
    with agent_at(path, scratch) as exporter:
        live(exporter, 1, (0, 1))
    with agent_at(path, scratch, run_id="r2") as exporter:
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
def test_damaged_counters_are_ignored(scratch: Path, damage: bytes | dict[str, object]) -> None:
    path = scratch / "sums.json"
    with agent_at(path, scratch) as exporter:
        live(exporter, 1, (0, 1))
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    assert read_counters(path, run_id="r1") == CounterState()
    with agent_at(path, scratch) as exporter:
        exporter.set_group(generation=1, world_size=2, local_ranks=[0, 1])
        assert total(shown(exporter), "kdist_steps_total") == 0


def test_other_help_leaves_a_layout_as_it_is_and_other_numbers_are_another_one() -> None:
    metric = Metric(
        name="kdist_x_seconds",
        kind=Kind.HISTOGRAM,
        help="Before.",
        scope=Scope.RANK,
        labels=("phase",),
        series=(("a",), ("b",)),
        buckets=(0.1, 1.0),
    )
    layout = digest_layout([metric])
    assert digest_layout([replace(metric, help="After.")]) == layout
    others: list[dict[str, Any]] = [
        {"name": "kdist_y_seconds"},
        {"kind": Kind.COUNTER},
        {"series": (("a",), ("c",))},
        {"buckets": (0.1, 2.0)},
    ]
    assert len({layout, *(digest_layout([replace(metric, **other)]) for other in others)}) == 5


def test_storage_that_hangs_or_fails_blocks_no_scrape(
    scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(scratch / "hangs.new")  # opening it to write waits for a reader that never comes
    (scratch / "file").write_text("")
    for path in (scratch / "hangs.json", scratch / "file" / "sums.json"):
        with agent_at(path, scratch) as exporter:
            live(exporter, 1, (0, 1))
            begun = time.monotonic()
            assert total(shown(exporter), "kdist_steps_total") == 2
            assert time.monotonic() - begun < 5
    assert capfd.readouterr().err.count('"event":"counters-not-persisted"') == 1


def test_a_pod_of_an_indexed_job_is_identified_by_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    assert counters_path(tmp_path, run_id="r", node="a-0-xyz") != counters_path(
        tmp_path, run_id="r", node="a-0-abc"
    )
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    first = counters_path(tmp_path, run_id="r", node="a-0-xyz")
    assert first == counters_path(tmp_path, run_id="r", node="a-0-abc")
    assert first != counters_path(tmp_path, run_id="other", node="a-0-abc")


@pytest.mark.processes
def test_counters_survive_a_killed_agent(tmp_path: Path) -> None:
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

"""What the clocks of a step add up to."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation import step_timer
from kdist_trainer.instrumentation.step_timer import (
    BandwidthProbe,
    GlooAllReduceTimer,
    StepTimer,
    add_all_reduces,
)
from kdist_trainer.metrics.rank_metrics import StepPhase, StepStats
from kdist_trainer.processes.liveness import Heartbeat
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import WIDE, Late, SlowToCount, describe, train, train_watched


def test_laps_sum_to_the_time_they_cover_and_skips_belong_to_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 57.0, 61.0])
    monkeypatch.setattr(step_timer, "perf_counter", lambda: next(now))
    stats = StepStats()
    stopwatch = StepTimer(stats)
    assert stopwatch.exclude() == 1.0
    stopwatch.record_phase(StepPhase.DATA_WAIT)
    stopwatch.record_phase(StepPhase.FORWARD)
    assert stopwatch.finish_step() == 6.0
    assert stopwatch.exclude() == 50.0
    stopwatch.record_phase(StepPhase.FORWARD)
    assert stopwatch.finish_step() == 4.0
    assert stats.phase[StepPhase.DATA_WAIT] == 2.0
    assert stats.phase[StepPhase.FORWARD] == 8.0
    assert sum(stats.phase) == 10.0


def test_overlapping_all_reduces_are_counted_once_and_only_the_tail_is_exposed() -> None:
    stats = StepStats()
    stats.phase[StepPhase.BACKWARD] = 10.0
    add_all_reduces(stats, [(1.0, 4.0), (2.0, 3.0), (6.0, 7.0), (6.5, 9.0)], nbytes=100)
    assert stats.collective_seconds[0] == pytest.approx(3 + 3)
    assert stats.phase[StepPhase.COMM_EXPOSED] == pytest.approx(2.5)
    assert sum(stats.phase) == pytest.approx(10.0)
    assert (stats.collectives[0], stats.collective_bytes[0]) == (4, 100)
    assert stats.all_reduce_duration[-1] == pytest.approx(3 + 1 + 1 + 2.5)


def test_a_step_without_all_reduces_adds_nothing() -> None:
    stats = StepStats()
    add_all_reduces(stats, [], nbytes=0)
    assert sum(stats.phase) == stats.collectives[0] == 0


class Handle:
    """An all-reduce that ends when a test says so."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """What the timer waits for."""
        return self.future


def test_an_all_reduce_whose_word_is_late_ended_at_the_latest_with_the_backward_pass(
    tmp_path: Path,
) -> None:
    stats, heartbeat = StepStats(), Heartbeat.create(tmp_path / "beat")
    timer = GlooAllReduceTimer(stats, heartbeat)
    group: Any = None
    assert timer.begin("all_reduce", [torch.ones(4)], group) is None, "no step is under way"
    timer.start()
    assert timer.begin("broadcast", [torch.ones(4)], group) is None
    handles = [Handle(), Handle()]
    for handle in handles:
        follow = timer.begin("all_reduce", [torch.ones(4)], group)
        heartbeat.enter("all_reduce", 4, "torch.float32")
        assert follow is not None
        follow(cast("Any", handle))
    handles[0].future.set_result([])
    assert heartbeat.read().inside, "the other is still under way"
    timer.finish_step()
    assert not heartbeat.read().inside
    assert (stats.collectives[0], stats.collective_bytes[0]) == (2, 32)
    assert 0 < stats.phase[StepPhase.COMM_EXPOSED] <= stats.collective_seconds[0]
    heartbeat.enter("barrier", 0, "")
    handles[1].future.set_result([])
    assert heartbeat.read().inside, (
        "a word of the step before says nothing about what was entered since"
    )
    timer.close()
    timer.start()
    timer.finish_step()
    assert stats.collectives[0] == 2


def train_and_tell(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, and return the rank's sums and what its steps took."""
    seconds: list[float] = []
    run = train_watched(document, folder, steps=seconds)
    stats = run.stats
    return {
        "phase": list(stats.phase),
        "seconds": sum(seconds),
        "count": stats.collectives[0],
        "bytes": stats.collective_bytes[0],
        "busy": stats.collective_seconds[0],
        "steps": stats.steps,
        "samples": stats.samples,
        "flops": stats.model_flops,
        "matrices": sum(weight.numel() for weight in run.module.parameters() if weight.ndim == 2),
        "weights": sum(weight.nbytes for weight in run.module.parameters()),
    }


def probe_and_tell() -> dict[str, Any]:
    """Probe as one of the group's ranks."""
    with World.from_environment(timeout_seconds=60):
        stats, off, group, cpu = StepStats(), StepStats(), dist.group.WORLD, torch.device("cpu")
        assert isinstance(group, dist.ProcessGroup)
        prober = BandwidthProbe(stats, group, cpu)
        due = [prober.is_due(seconds) for seconds in (0.0, BandwidthProbe.EVERY_SECONDS - 1, 1.0)]
        begun = perf_counter()
        prober.measure()
        seconds = perf_counter() - begun
        BandwidthProbe(off, group, cpu, enabled=False).measure()
        due.append(prober.is_due(1.0))
        prober.postpone()
        due += [prober.is_due(BandwidthProbe.POSTPONED_SECONDS - 1), prober.is_due(1.0)]
    return {
        "bandwidth": stats.probe_bandwidth,
        "seconds": seconds,
        "due": due,
        "off": off.probe_bandwidth,
    }


@pytest.mark.processes
def test_a_probe_reports_the_bandwidth_of_nccl_tests_and_when_it_is_due_again() -> None:
    for rank in run_group(probe_and_tell, 2):
        assert rank["due"] == [False, False, True, False, False, True]
        assert rank["off"] is None
        # for two ranks the factor 2(n-1)/n is 1, and the best of three rounds is faster
        least = 4 * 2**20 / rank["seconds"]
        assert least * 3 <= rank["bandwidth"] < 1e12


@pytest.mark.processes
def test_a_rank_that_waits_shows_which_collective_it_is_in(tmp_path: Path) -> None:
    run_group(train, 2, describe(workload=f"{Late.__module__}:Late", virtualShards=2), tmp_path)
    phase, step, collective = (tmp_path / "waits").read_text().split(maxsplit=2)
    assert (phase, step) == ("step", "4"), "the sixth loss, of which two were the warm-up's"
    assert collective.startswith("all_reduce(float32[1083])")


@pytest.mark.processes
@pytest.mark.parametrize("timing", ["on", "off"])
@pytest.mark.sampled
def test_phases_sum_to_the_steps_and_all_reduces_move_every_gradient(
    tmp_path: Path, timing: str
) -> None:
    reported = run_group(
        train_and_tell,
        2,
        describe(options=WIDE, collectiveTiming=timing, virtualShards=4),
        tmp_path,
    )
    for rank in reported:
        assert sum(rank["phase"]) == pytest.approx(rank["seconds"], rel=1e-3)
        assert all(seconds >= 0 for seconds in rank["phase"])
        assert rank["flops"] == 3 * 2 * rank["matrices"] * rank["samples"]
    assert sum(rank["samples"] for rank in reported) == 100
    if timing == "on":
        assert all(rank["bytes"] == rank["steps"] * rank["weights"] for rank in reported)
        assert all(rank["count"] == 4 * rank["steps"] for rank in reported), (
            "four buckets of a MiB or less"
        )
        assert all(0 < rank["phase"][StepPhase.COMM_EXPOSED] <= rank["busy"] for rank in reported)
    else:
        assert all(rank["count"] == rank["busy"] == 0 for rank in reported)


@pytest.mark.processes
def test_a_rank_is_not_busy_while_it_waits_for_a_slower_one_to_count_its_samples(
    tmp_path: Path,
) -> None:
    slow = {"workload": f"{SlowToCount.__module__}:SlowToCount", "options": {"seconds": 0.1}}
    waiting, slow_rank = run_group(train_and_tell, 2, describe(virtualShards=2, **slow), tmp_path)
    slept, forward = 0.1 * slow_rank["steps"], StepPhase.FORWARD
    assert waiting["phase"][forward] + slept / 2 < slow_rank["phase"][forward]


def train_and_note_what_is_sent(document: dict[str, Any], folder: Path) -> list[int]:
    """Train, and return the steps whose numbers were sent in any case."""
    sent: list[int] = []
    train_watched(document, folder, sent=sent)
    return sent


@pytest.mark.processes
def test_the_last_step_is_reported_before_the_model_is_measured_or_saved(tmp_path: Path) -> None:
    document = describe(epochs=1, evaluate="end", evaluateEverySteps=2)
    (sent,) = run_group(train_and_note_what_is_sent, 1, document, tmp_path)
    assert sent[0] == 2, "on the way"
    assert set(sent[1:]) == {4, 5}, "at the second measuring and at the end, whoever is quicker"

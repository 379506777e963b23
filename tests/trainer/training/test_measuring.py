"""What the timing of collectives is worth: held to torch's profiler, and to ranks of which one is
known to be slow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation.step_timer import (
    GlooAllReduceTimer,
    GlooCollectiveTimer,
    StepTimer,
)
from kdist_trainer.metrics.rank_metrics import Op, StepPhase, StepStats
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import Dawdling, describe, train_watched

STEPS = 50
pytestmark = pytest.mark.chaos


def measure_both_ways() -> dict[str, float]:
    """Time fifty steps' all-reduces by ours and by the profiler, as one rank of two; seconds with
    one in flight.
    """
    with World.from_environment(timeout_seconds=60):
        stats = StepStats()
        timer = GlooAllReduceTimer(stats)
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])
        wrapped = DistributedDataParallel(model, bucket_cap_mb=4)
        inputs = torch.randn(64, 1024)
        for _ in range(3):
            wrapped(inputs).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(STEPS):
                timer.start()
                wrapped(inputs).sum().backward()
                timer.finish_step()
        events = profiler.events() or []
        spans = [
            (one.time_range.start, one.time_range.end)
            for one in events
            if one.name == "gloo:all_reduce"
        ]
    return {
        "ours": stats.collective_seconds[0],
        "profiler": union(spans) / 1e6,
        "count": stats.collectives[0],
        "spans": len(spans),
    }


def measure_fsdp_both_ways() -> dict[str, tuple[float, float]]:
    """Seconds with an all-gather, and with a reduce-scatter, in flight in twenty steps of `fsdp`:
    by us, and by the profiler.
    """
    with World.from_environment(timeout_seconds=60):
        stats = StepStats()
        stopwatch = StepTimer(stats)
        timer = GlooCollectiveTimer(stats, stopwatch)
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
        inputs = torch.randn(64, 1024)
        for _ in range(3):
            model(inputs).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(20):
                timer.start()
                loss = model(inputs).sum()
                stopwatch.record_phase(StepPhase.FORWARD)
                loss.backward()
                stopwatch.record_phase(StepPhase.BACKWARD)
                timer.finish_step()
        events = profiler.events() or []
    found = {"exposed": (stats.phase[StepPhase.COMM_EXPOSED], sum(stats.collective_seconds))}
    # From the call to the end of what gloo does for it: a reduce-scatter is an all-reduce of a
    # copy.
    for op, called, name in (
        (Op.ALL_GATHER, "c10d::_allgather_base_", "gloo:all_gather"),
        (Op.REDUCE_SCATTER, "c10d::_reduce_scatter_base_", "gloo:all_reduce"),
    ):
        ends = sorted(one.time_range.end for one in events if one.name == name)
        begins = sorted(one.time_range.start for one in events if one.name == called)
        assert len(begins) == len(ends) == stats.collectives[op]
        found[op.name.lower()] = (
            stats.collective_seconds[op],
            union(list(zip(begins, ends, strict=True))) / 1e6,
        )
    return found


def union(spans: list[tuple[float, float]]) -> float:
    """Time that at least one of the spans covers."""
    covered, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


@pytest.mark.sampled
def test_the_time_with_an_all_reduce_in_flight_is_the_profilers(
    record_property: Callable[[str, object], None],
) -> None:
    for reported in run_group(measure_both_ways, 2):
        assert reported["count"] == reported["spans"] >= 5 * STEPS
        record_property("our seconds", round(reported["ours"], 4))
        record_property("profiler seconds", round(reported["profiler"], 4))
        assert reported["ours"] == pytest.approx(reported["profiler"], rel=0.25)


@pytest.mark.sampled
def test_the_time_in_which_fsdp_gathers_and_scatters_is_the_profilers(
    record_property: Callable[[str, object], None],
) -> None:
    for reported in run_group(measure_fsdp_both_ways, 2):
        record_property("seconds", reported)
        exposed, busy = reported.pop("exposed")
        assert 0 < exposed <= busy, "every one is waited for"
        for ours, profilers in reported.values():
            assert ours == pytest.approx(profilers, rel=0.25)


def train_and_tell(document: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Train, and return the rank's busy seconds, and its seconds with a collective in flight."""
    stats = train_watched(document, folder).stats
    busy = (StepPhase.DATA_WAIT, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)
    return sum(stats.phase[phase] for phase in busy), sum(stats.collective_seconds)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("strategy", "seed"),
    [
        ("ddp", 0),
        ("fsdp", 1),
        *[pytest.param("ddp", seed, marks=pytest.mark.wide) for seed in (1, 2, 3, 4)],
    ],
)
def test_a_slow_rank_is_named_by_its_busy_time_and_by_no_collective(
    tmp_path: Path, strategy: str, seed: int
) -> None:
    slow = random.Random(seed).randrange(3)
    options = {"rank": slow, "seconds": 0.1}
    reported = run_group(
        train_and_tell,
        3,
        describe(
            workload=f"{Dawdling.__module__}:Dawdling",
            options=options,
            strategy=strategy,
            virtualShards=3,
            epochs=4,
        ),
        tmp_path,
    )
    busy, reducing = zip(*reported, strict=True)
    others = [seconds for rank, seconds in enumerate(busy) if rank != slow]
    assert busy[slow] > 1.3 * max(others), "what the alert looks at"
    assert reducing[slow] == min(reducing), "the others wait for it in theirs"

"""What a rank says that it takes, and what it could do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import flop_counter

from kdist_trainer.config import Training
from kdist_trainer.instrumentation import device_stats
from kdist_trainer.instrumentation.device_stats import (
    DeviceStats,
    peak_flops,
    resident_bytes,
    was_counting,
)
from kdist_trainer.metrics.rank_metrics import StepStats


def make(stats: StepStats, waiting: int | None = None, **train: Any) -> DeviceStats:
    return DeviceStats(
        stats,
        torch.device("cpu"),
        Training(workload="digits", steps=1, **train),
        waiting=lambda: waiting,
    )


def test_a_forward_pass_is_a_third_of_the_arithmetic() -> None:
    stats = StepStats()
    found = make(stats)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    with found.counting(samples=8):
        model(torch.zeros(8, 20)).sum()
    stats.samples = 1000
    found.sample()
    assert stats.model_flops == 1000 * 3 * 2 * (20 * 30 + 30 * 5)


def test_what_was_not_counted_is_not_shown() -> None:
    stats = StepStats()
    stats.samples = 1000
    make(stats).sample()
    assert stats.model_flops == 0
    assert stats.queue_depth is stats.device_allocated is stats.peak_flops is None


@pytest.mark.parametrize("train", [{"compile": "aot_eager"}, {"strategy": "tensor"}])
def test_arithmetic_that_torch_cannot_see_is_not_counted(train: dict[str, Any]) -> None:
    stats = StepStats()
    found = make(stats, **train)
    with found.counting(samples=8):
        nn.Linear(20, 30)(torch.zeros(8, 20))
    stats.samples = 1000
    found.sample()
    assert stats.model_flops == 0


def test_only_the_counters_own_stumble_is_forgiven() -> None:
    found = make(StepStats())
    shapes = [torch.Size(shape) for shape in ((1, 4, 8, 16), (2, 4, 8, 16), (1, 4, 8, 16))]
    with pytest.raises(AssertionError) as stumble:
        flop_counter.sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
    assert was_counting(stumble.value)
    left, right = torch.zeros(2, 3), torch.zeros(2, 3)
    with pytest.raises(RuntimeError) as mistake, found.counting(samples=1):
        torch.mm(left, right)
    assert not was_counting(mistake.value)
    with pytest.raises(KeyError) as own, found.counting(samples=1):
        raise KeyError("the workload's own")
    assert not was_counting(own.value)


def test_memory_and_waiting_batches_are_looked_at_once_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats, now = StepStats(), 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    found = make(stats, waiting=3)
    found.sample()
    assert stats.queue_depth == 3
    assert stats.memory is not None
    assert 10e6 < stats.memory < 1e12
    stats.queue_depth = None
    found.sample()
    assert stats.queue_depth is None
    now += device_stats.SAMPLE_SECONDS
    found.sample()
    assert stats.queue_depth == 3


def test_where_there_is_no_proc_memory_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_stats, "_PAGES", tmp_path / "statm")
    assert resident_bytes() is None


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "fp16", 121e12),
        ("something new", "bf16", None),
    ],
)
def test_the_peak_is_that_of_the_precision_or_unknown(
    device: str, precision: str, peak: float | None
) -> None:
    assert peak_flops(device, precision) == peak

"""Resource usage of a rank: memory of its process and device, prefetched batches, and FLOPs of its
model.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from kdist_trainer.config import Training
from kdist_trainer.metrics.rank_metrics import StepStats

SAMPLE_SECONDS = 1.0
"""Minimum time between two samples."""

_PAGES = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
# Dense bf16 and fp16 FLOP/s from the vendors' data sheets; the first whose name is part of the
# device's name applies.
_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
)
_HALVES = {"bf16", "fp16", "bf16-params"}


class DeviceStats:
    """Samples a rank's resource usage into its `stats`."""

    def __init__(
        self,
        stats: StepStats,
        device: torch.device,
        train: Training,
        *,
        waiting: Callable[[], int | None],
    ) -> None:
        """Sample nothing yet. `waiting` returns how many prefetched batches are ready, None without
        prefetching.
        """
        self._stats = stats
        self._device = device
        self._waiting = waiting
        # With these strategies a rank's own forward pass is its share of the arithmetic. Compiled
        # code is not counted.
        self._counts = train.compile == "off" and train.strategy in (
            "ddp",
            "fsdp",
            "hsdp",
            "data_parallel",
        )
        self._next = 0.0
        self.flops_per_sample = 0.0
        """Of a forward and a backward pass, counted or taken over from a former group; 0 if they
        are not known.
        """
        if device.type == "cuda":
            stats.peak_flops = peak_flops(torch.cuda.get_device_name(device), train.precision)

    @contextmanager
    def counting(self, samples: int) -> Iterator[None]:
        """Count the FLOPs of the forward pass over `samples` samples in this block, if possible."""
        if not self._counts:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        # The backward pass does the arithmetic of the forward pass twice: for the inputs and for
        # the weights.
        self.flops_per_sample = 3 * counter.get_total_flops() / max(1, samples)

    def sample(self) -> None:
        """Take a sample, at most one every `SAMPLE_SECONDS`. Takes microseconds and never waits for
        a device.
        """
        self._stats.model_flops = self._stats.samples * self.flops_per_sample
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        stats = self._stats
        stats.memory = resident_bytes()
        stats.queue_depth = self._waiting()
        if self._device.type == "cuda":
            known = torch.cuda.memory_stats(self._device)
            stats.device_allocated = known.get("allocated_bytes.all.current", 0)
            stats.device_reserved = known.get("reserved_bytes.all.current", 0)
            peak = known.get("allocated_bytes.all.peak", 0)  # of a phase, if those are noted
            stats.device_peak = max(stats.device_peak or 0, peak)
            stats.alloc_retries = known.get("num_alloc_retries", 0)


def was_counting(error: Exception) -> bool:
    """Whether `error` came from torch's FLOP counter, which has a wrong formula for some operation,
    the same one on every rank.

    Operations themselves raise `RuntimeError`, for which this is False: one rank must not repeat a
    pass alone.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        not isinstance(error, RuntimeError)
        and frames[-1].f_code.co_filename == flop_counter.__file__
    )


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes; None without /proc."""
    try:
        return int(_PAGES.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOP/s of a device, such as `NVIDIA H100 PCIe`, in a `precision` of job.yaml, from the
    vendor's data sheet; None for an unknown device or precision.
    """
    peak = next((peak for name, peak in _PEAKS if name in device), None)
    if peak is None or precision in _HALVES:
        return peak
    tensor_cores = precision == "tf32" and not any(name in device for name in ("V100", "T4"))
    return peak / 2 if tensor_cores else None

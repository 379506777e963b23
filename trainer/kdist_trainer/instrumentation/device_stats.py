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
from kdist_trainer.metrics.step_stats import StepStats

LOOK_SECONDS = 1.0
"""Least time between two looks."""

_PAGES = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
# Dense bf16 and fp16 FLOP/s, by what the device's name holds: the first that fits. From the makers'
# data sheets.
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
    """Puts into a rank's `stats` what it takes. `waiting` says how many batches are ready, None
    where nobody fetches ahead.
    """

    def __init__(
        self,
        stats: StepStats,
        device: torch.device,
        train: Training,
        *,
        waiting: Callable[[], int | None],
    ) -> None:
        self._stats = stats
        self._device = device
        self._waiting = waiting
        # A rank's own forward pass is its share of the arithmetic, and can be seen: not inside of
        # compiled code.
        self._counts = train.compile == "off" and train.strategy in (
            "ddp",
            "fsdp",
            "hsdp",
            "data_parallel",
        )
        self._next = 0.0
        self._flops_per_sample = 0.0
        if device.type == "cuda":
            stats.peak_flops = peak_flops(torch.cuda.get_device_name(device), train.precision)

    @contextmanager
    def counting(self, samples: int) -> Iterator[None]:
        """Count the FLOPs of a forward pass over so many samples, made in this block, where they
        can be counted.
        """
        if not self._counts:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        # The backward pass does the arithmetic of the forward pass once for the inputs and once for
        # the weights.
        self._flops_per_sample = 3 * counter.get_total_flops() / max(1, samples)

    def look(self) -> None:
        """Note what there is now, unless the last look was a moment ago; some microseconds, and no
        wait for a device.
        """
        self._stats.model_flops = self._stats.samples * self._flops_per_sample
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        stats = self._stats
        stats.memory = resident_bytes()
        stats.queue_depth = self._waiting()
        if self._device.type == "cuda":
            known = torch.cuda.memory_stats(self._device)
            stats.device_allocated = known.get("allocated_bytes.all.current", 0)
            stats.device_reserved = known.get("reserved_bytes.all.current", 0)
            stats.device_peak = known.get("allocated_bytes.all.peak", 0)
            stats.alloc_retries = known.get("num_alloc_retries", 0)


def was_counting(error: Exception) -> bool:
    """Whether torch's counter stumbled over an operation that it has no right formula for, the same
    on every rank.

    What the operations themselves raise are `RuntimeError`s, and passed on: a pass must not be
    tried again on one rank alone.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        not isinstance(error, RuntimeError)
        and frames[-1].f_code.co_filename == flop_counter.__file__
    )


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where there is no /proc."""
    try:
        return int(_PAGES.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOP/s of a device by its name, in a precision of job.yaml; None where it is not
    known.
    """
    peak = next((peak for name, peak in _PEAKS if name in device), None)
    if peak is None or precision in _HALVES:
        return peak
    tensor_cores = precision == "tf32" and not any(name in device for name in ("V100", "T4"))
    return peak / 2 if tensor_cores else None

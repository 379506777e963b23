"""Resource metrics of one rank: memory, FLOPs and prefetched batches. `StepStats` inherits them."""

from __future__ import annotations

from dataclasses import dataclass

from kdist_trainer.metrics.declarations import Scope, counter, gauge


@dataclass(slots=True, eq=False)
class ResourceStats:
    """Bytes, FLOPs and counts; a gauge is None while it is unknown."""

    model_flops: float = counter(
        "kdist_model_flops_total",
        (
            "Model FLOPs of the steps done: three times the forward pass, whatever is "
            "computed twice (absent if not counted)"
        ),
        scope=Scope.RANK,
        quiet=True,
    )
    alloc_retries: float = counter(
        "kdist_device_alloc_retries_total",
        "Allocations that succeeded after the accelerator's cached memory was freed",
        scope=Scope.RANK,
        quiet=True,
    )
    memory: float | None = gauge(
        "kdist_rank_memory_bytes",
        "Resident memory of the rank's process; pages that ranks share count in each",
        scope=Scope.RANK,
        unit="bytes",
    )
    device_allocated: float | None = gauge(
        "kdist_device_memory_allocated_bytes",
        "Accelerator memory in tensors",
        scope=Scope.RANK,
        unit="bytes",
    )
    device_reserved: float | None = gauge(
        "kdist_device_memory_reserved_bytes",
        "Accelerator memory that the allocator holds",
        scope=Scope.RANK,
        unit="bytes",
    )
    device_peak: float | None = gauge(
        "kdist_device_memory_peak_bytes",
        "Most accelerator memory in tensors since the rank's start",
        scope=Scope.RANK,
        unit="bytes",
    )
    queue_depth: float | None = gauge(
        "kdist_dataloader_queue_depth",
        "Samples' chunks that loader processes have ready (absent without loader processes)",
        scope=Scope.RANK,
    )
    peak_flops: float | None = gauge(
        "kdist_device_peak_flops",
        (
            "Peak FLOP/s of one rank's accelerator in the job's precision, dense (absent "
            "where unknown)"
        ),
        scope=Scope.NODE,
    )

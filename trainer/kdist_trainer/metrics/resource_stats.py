"""Resource metrics of one rank: memory, FLOPs and prefetched batches; a base of `StepStats`."""

from __future__ import annotations

from dataclasses import dataclass

from kdist_trainer.metrics.declarations import Scope, counter, gauge


@dataclass(slots=True, eq=False)
class ResourceStats:
    """Bytes, FLOPs and counts. A gauge is None while it is unknown."""

    model_flops: float = counter(
        "kdist_model_flops_total",
        (
            "Model FLOPs of the completed steps: three times those of the forward pass, "
            "recomputation excluded (absent if not counted)"
        ),
        scope=Scope.RANK,
        hide_zero=True,
    )
    alloc_retries: float = counter(
        "kdist_device_alloc_retries_total",
        "Allocations of accelerator memory that needed a second attempt after the cache was freed",
        scope=Scope.RANK,
        hide_zero=True,
    )
    memory: float | None = gauge(
        "kdist_rank_memory_bytes",
        "Resident memory of the rank's process; shared pages are counted in every rank",
        scope=Scope.RANK,
        unit="bytes",
    )
    device_allocated: float | None = gauge(
        "kdist_device_memory_allocated_bytes",
        "Accelerator memory allocated to tensors",
        scope=Scope.RANK,
        unit="bytes",
    )
    device_reserved: float | None = gauge(
        "kdist_device_memory_reserved_bytes",
        "Accelerator memory reserved by the caching allocator",
        scope=Scope.RANK,
        unit="bytes",
    )
    device_peak: float | None = gauge(
        "kdist_device_memory_peak_bytes",
        "Maximum of the accelerator memory allocated to tensors since the rank started",
        scope=Scope.RANK,
        unit="bytes",
    )
    queue_depth: float | None = gauge(
        "kdist_dataloader_queue_depth",
        "Prefetched batches (absent without loader processes)",
        scope=Scope.RANK,
    )
    peak_flops: float | None = gauge(
        "kdist_device_peak_flops",
        ("Peak dense FLOP/s of one rank's accelerator in the job's precision (absent if unknown)"),
        scope=Scope.NODE,
    )

"""`StepStats`: the metrics of one rank, those of its resources (memory, FLOPs, prefetched batches)
included, each declared once with its name, which ends with its unit, and help.

`StepPhase` divides a step's time, `WallCategory` a run's wall time. All counters are cumulative
over the life of the object, so a lost datagram costs resolution and never a count. To add a metric,
add a field and the line that sets it (`add_step`): the record and the exposition follow from it.
CONTRIBUTING.md says what else shows it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from kdist_trainer.metrics.metric import Scope, counter, gauge, histogram


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
    compile_seconds: float = counter(
        "kdist_compile_seconds_total",
        "Time spent in torch.compile, including cache hits",
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
    )
    device_allocated: float | None = gauge(
        "kdist_device_memory_allocated_bytes",
        "Accelerator memory allocated to tensors",
        scope=Scope.RANK,
    )
    device_reserved: float | None = gauge(
        "kdist_device_memory_reserved_bytes",
        "Accelerator memory reserved by the caching allocator",
        scope=Scope.RANK,
    )
    device_peak: float | None = gauge(
        "kdist_device_memory_peak_bytes",
        "Maximum of the accelerator memory allocated to tensors since the rank started",
        scope=Scope.RANK,
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


class StepPhase(IntEnum):
    """Phases of a step; indices of `StepStats.phase`."""

    DATA_WAIT = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    COMM_EXPOSED = 4
    OTHER = 5


class WallCategory(StrEnum):
    """Categories of a run's wall time (goodput)."""

    STARTUP = "startup"
    RENDEZVOUS = "rendezvous"
    INIT = "init"
    DATA_WAIT = "data_wait"
    PRODUCTIVE_STEP = "productive_step"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_RESTORE = "checkpoint_restore"
    EVALUATION = "evaluation"
    STALLED = "stalled"
    RESTART = "restart"
    IDLE = "idle"
    UNOBSERVED = "unobserved"
    """A script runs that reports no steps, so its time cannot be attributed."""


WALL_CATEGORIES = tuple(str(category) for category in WallCategory)
"""Their names, in the order of `StepStats.wall_seconds`."""

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "barrier",
    "all_to_all",
    "send",
    "recv",
)
"""Names of collectives that metrics may have as label values."""


class Op(IntEnum):
    """Collectives that are timed; indices of `StepStats.collectives`."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2


# ruff: noqa: RUF009  counter, gauge and histogram return what dataclasses.field returns


STEP_BUCKETS = (0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0)
ALL_REDUCE_BUCKETS = (0.005, 0.02, 0.1, 1.0)
SAVE_BUCKETS = (0.5, 30.0, 600.0)
_SAVE_SERIES = len(SAVE_BUCKETS) + 2
_EWMA_WEIGHT = 0.1

_FAILURES = (
    *(("save", cause) for cause in ("enospc", "eio", "timeout", "unloadable", "other")),
    *(("restore", cause) for cause in ("corrupt", "mismatch", "eio", "timeout", "other")),
)
_FALLBACKS = (("corrupt",), ("eio",), ("other",))
_OPS = tuple((op.name.lower(),) for op in Op)


@dataclass(slots=True, eq=False)
class StepStats(ResourceStats):
    """The metrics of one rank in one generation: seconds, bytes and counts, never rates.

    The training loop updates it and `Reporter` sends it. Not thread-safe.
    """

    rank: int = 0
    generation: int = 0
    sequence: int = 0
    """Sequence number of the latest packed record."""
    started_ns: int = field(default_factory=time.time_ns)
    """Unix time of the rank's start in nanoseconds. Within a generation, records of a later start
    supersede those of an earlier one.
    """

    dropped: float = counter(
        "kdist_exporter_records_dropped_total",
        "Records that a rank could not send to its agent",
        scope=Scope.RANK,
        hide_zero=True,
    )
    steps: float = counter(
        "kdist_steps_total",
        "Optimizer steps completed, including steps repeated after a restart",
        scope=Scope.RANK,
    )
    samples: float = counter("kdist_samples_total", "Samples consumed", scope=Scope.RANK)
    tokens: float = counter(
        "kdist_tokens_total",
        "Tokens consumed (absent if the workload has none)",
        scope=Scope.RANK,
        hide_zero=True,
    )
    phase: list[float] = counter(
        "kdist_step_phase_seconds_total",
        "Step time by phase; the phases add up to the step time",
        scope=Scope.RANK,
        labels=("phase",),
        series=tuple((phase.name.lower(),) for phase in StepPhase),
    )
    step_duration: list[float] = histogram(
        "kdist_step_duration_seconds",
        "Step time of all local ranks",
        scope=Scope.NODE,
        buckets=STEP_BUCKETS,
    )
    collective_seconds: list[float] = counter(
        "kdist_collective_seconds_total",
        "Time with at least one collective of this kind in flight, from launch to completion, "
        "waiting for peers included",
        scope=Scope.RANK,
        labels=("op",),
        series=_OPS,
        hide_zero=True,
    )
    collective_bytes: list[float] = counter(
        "kdist_collective_bytes_total",
        "Payload of the collectives (S in nccl-tests)",
        scope=Scope.RANK,
        labels=("op",),
        series=_OPS,
        hide_zero=True,
    )
    collectives: list[float] = counter(
        "kdist_collectives_total",
        "Collectives completed",
        scope=Scope.RANK,
        labels=("op",),
        series=_OPS,
        hide_zero=True,
    )
    all_reduce_duration: list[float] = histogram(
        "kdist_allreduce_duration_seconds",
        (
            "Duration of one all-reduce, from launch to completion, waiting for peers "
            "included (ddp and scripts); all-reduces overlap, so the sum may exceed elapsed time"
        ),
        scope=Scope.NODE,
        buckets=ALL_REDUCE_BUCKETS,
        hide_zero=True,
    )
    nonfinite: list[float] = counter(
        "kdist_nonfinite_total",
        "Steps whose loss or gradient was NaN or infinite",
        scope=Scope.RANK_ZERO,
        labels=("kind",),
        series=(("loss",), ("grad",)),
    )
    wall_seconds: list[float] = counter(
        "kdist_wall_seconds_total",
        (
            "Wall time by category; the categories add up to the lifetime of the agent and of "
            "its predecessors on this node"
        ),
        scope=Scope.LOCAL_RANK_ZERO,
        labels=("category",),
        series=tuple((category,) for category in WALL_CATEGORIES),
    )
    checkpoint_attempts: list[float] = counter(
        "kdist_checkpoint_attempts_total",
        "Checkpoint saves and restores, failures included",
        scope=Scope.RANK_ZERO,
        labels=("op",),
        series=(("save",), ("restore",)),
    )
    checkpoint_failures: list[float] = counter(
        "kdist_checkpoint_failures_total",
        "Failed checkpoint saves and restores",
        scope=Scope.RANK_ZERO,
        labels=("op", "cause"),
        series=_FAILURES,
        hide_zero=True,
    )
    checkpoint_duration: list[float] = histogram(
        "kdist_checkpoint_duration_seconds",
        (
            "Duration of checkpoint saves: mode blocking is the time that training was "
            "paused, mode total lasts until the commit is durable"
        ),
        scope=Scope.RANK_ZERO,
        labels=("op", "mode"),
        series=(("save", "blocking"), ("save", "total")),
        buckets=SAVE_BUCKETS,
    )
    checkpoint_fallbacks: list[float] = counter(
        "kdist_checkpoint_fallbacks_total",
        "Checkpoints skipped on resume because they could not be read",
        scope=Scope.RANK_ZERO,
        labels=("cause",),
        series=_FALLBACKS,
        hide_zero=True,
    )
    loss: float | None = gauge(
        "kdist_loss",
        "Last training loss: the mean over all ranks; for scripts the value that rank 0 reported",
        scope=Scope.RANK_ZERO,
    )
    evaluation_loss: float | None = gauge(
        "kdist_evaluation_loss",
        "Loss of the last evaluation (absent if none has reported one)",
        scope=Scope.RANK_ZERO,
    )
    grad_norm: float | None = gauge(
        "kdist_grad_norm", "Last global gradient norm", scope=Scope.RANK_ZERO
    )
    learning_rate: float | None = gauge(
        "kdist_learning_rate", "Learning rate of parameter group 0", scope=Scope.RANK_ZERO
    )
    last_step: float | None = gauge(
        "kdist_last_step", "Last completed optimizer step", scope=Scope.NODE
    )
    target_steps: float | None = gauge(
        "kdist_target_steps", "Total optimizer steps (absent if unknown)", scope=Scope.NODE
    )
    last_step_time: float | None = gauge(
        "kdist_last_step_timestamp_seconds",
        "Unix time at which the last step was completed",
        scope=Scope.NODE,
    )
    step_ewma: float | None = gauge(
        "kdist_step_duration_ewma_seconds",
        "Exponential moving average of the step time; maximum of the local ranks",
        scope=Scope.NODE,
    )
    checkpoint_bytes: float | None = gauge(
        "kdist_checkpoint_size_bytes",
        "Size of the last committed checkpoint",
        scope=Scope.RANK_ZERO,
    )
    checkpoint_time: float | None = gauge(
        "kdist_checkpoint_last_success_timestamp_seconds",
        "Unix time of the last committed checkpoint",
        scope=Scope.RANK_ZERO,
    )
    checkpoint_step: float | None = gauge(
        "kdist_checkpoint_last_success_step",
        "Step of the last committed checkpoint",
        scope=Scope.RANK_ZERO,
    )
    checkpoint_interval: float | None = gauge(
        "kdist_checkpoint_interval_seconds",
        (
            "Time between two checkpoints: the configured time, or that of the configured "
            "number of steps at the current step time"
        ),
        scope=Scope.RANK_ZERO,
    )
    probe_bandwidth: float | None = gauge(
        "kdist_allreduce_probe_bus_bandwidth_bytes_per_second",
        (
            "Bus bandwidth of the last all-reduce probe over all ranks, without other load: "
            "S/t * 2(n-1)/n"
        ),
        scope=Scope.RANK_ZERO,
    )

    def add_step(self, seconds: float, samples: int, step: int) -> None:
        """Count one optimizer step of this rank, which consumed that number of samples."""
        self.steps += 1
        self.samples += samples
        self.last_step = step
        self.last_step_time = time.time()
        self.step_ewma = (
            seconds
            if self.step_ewma is None
            else self.step_ewma + _EWMA_WEIGHT * (seconds - self.step_ewma)
        )
        self.step_duration[bisect_left(STEP_BUCKETS, seconds)] += 1
        self.step_duration[-1] += seconds

    def add_all_reduces(
        self, *, busy: float, exposed: float, nbytes: int, durations: Sequence[float]
    ) -> None:
        """Count the all-reduces of a step. `busy` are the seconds with at least one in flight, and
        `exposed` those of them that no computation overlapped.
        """
        self.add_collectives(Op.ALL_REDUCE, busy=busy, nbytes=nbytes, count=len(durations))
        self.phase[StepPhase.COMM_EXPOSED] += exposed
        for seconds in durations:
            self.observe_all_reduce(seconds)

    def observe_all_reduce(self, seconds: float) -> None:
        """Observe the duration of one all-reduce, from launch to completion, in seconds."""
        self.all_reduce_duration[bisect_left(ALL_REDUCE_BUCKETS, seconds)] += 1
        self.all_reduce_duration[-1] += seconds

    def add_collectives(self, op: Op, *, busy: float, nbytes: float, count: int) -> None:
        """Count the collectives of one kind; `busy` are the seconds with at least one in flight."""
        self.collective_seconds[op] += busy
        self.collective_bytes[op] += nbytes
        self.collectives[op] += count

    def add_nonfinite(self, kind: str) -> None:
        """Count a step with a NaN or infinity; `kind` is `loss` or `grad`."""
        self.nonfinite[0 if kind == "loss" else 1] += 1

    def add_wall(self, category: str, seconds: float) -> None:
        """Add seconds that the rank spent outside of its steps. Raises `ValueError` if `category`
        is not a `WallCategory`.
        """
        self.wall_seconds[WALL_CATEGORIES.index(category)] += seconds

    def add_checkpoint(
        self,
        op: str,
        *,
        cause: str | None = None,
        visible: float = 0.0,
        total: float = 0.0,
        nbytes: int = 0,
        step: int | None = None,
    ) -> None:
        """Count a save or a restore (`op`) of a checkpoint, which failed if there is a `cause`.
        Training was paused for `visible` seconds, and the commit durable after `total`.
        """
        self.checkpoint_attempts[0 if op == "save" else 1] += 1
        if cause is not None:
            known = (op, cause) if (op, cause) in _FAILURES else (op, "other")
            self.checkpoint_failures[_FAILURES.index(known)] += 1
        elif op == "save":
            for start, seconds in ((0, visible), (_SAVE_SERIES, total)):
                self.checkpoint_duration[start + bisect_left(SAVE_BUCKETS, seconds)] += 1
                self.checkpoint_duration[start + _SAVE_SERIES - 1] += seconds
            self.checkpoint_bytes = nbytes
            self.checkpoint_time = time.time()
            self.checkpoint_step = step

    def add_fallback(self, cause: str) -> None:
        """Count a checkpoint that was skipped on resume."""
        known = (cause,) if (cause,) in _FALLBACKS else ("other",)
        self.checkpoint_fallbacks[_FALLBACKS.index(known)] += 1

"""`StepStats`: every metric that a rank's steps yield, declared once with its name, unit and help.

`StepPhase` divides a step's time and `Wall` a run's wall time. All counters are cumulative over the
life of the object, so a lost datagram costs resolution and never a count. To add a metric add a
field: the record, the exposition, docs/metrics.md and the tests follow from it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from kdist_trainer.metrics.declarations import Scope, counter, gauge, histogram
from kdist_trainer.metrics.resource_stats import ResourceStats


class StepPhase(IntEnum):
    """Parts of a step, indices of `StepStats.phase`."""

    DATA_WAIT = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    COMM_EXPOSED = 4
    OTHER = 5


class Wall(StrEnum):
    """Categories that a run's wall time is divided into."""

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
    """A script is at work that reports no steps: nobody knows what it does."""


WALL_CATEGORIES = tuple(str(category) for category in Wall)


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
"""Collectives by the names that a metric may show."""


class Op(IntEnum):
    """Collectives that are timed, indices of `StepStats.collectives`."""

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
    *(("save", cause) for cause in ("enospc", "eio", "timeout", "other")),
    *(("restore", cause) for cause in ("corrupt", "mismatch", "eio", "timeout", "other")),
)
_FALLBACKS = (("corrupt",), ("eio",), ("other",))
_OPS = tuple((op.name.lower(),) for op in Op)


@dataclass(slots=True, eq=False)
class StepStats(ResourceStats):
    """The running sums of one rank in one generation. Seconds, bytes and counts, never rates.

    The rank's loop adds to it; `Reporter` sends it. Not for several threads at once.
    """

    rank: int = 0
    generation: int = 0
    sequence: int = 0
    """Number of the latest packed record."""
    started_ns: int = field(default_factory=time.time_ns)
    """Unix time of the rank's start: a later one in the same generation supersedes."""

    dropped: float = counter(
        "kdist_exporter_records_dropped_total",
        "Records that a worker could not send",
        scope=Scope.RANK,
        quiet=True,
    )
    steps: float = counter(
        "kdist_steps_total",
        "Optimizer steps completed, repeats after a restart included",
        scope=Scope.RANK,
    )
    samples: float = counter("kdist_samples_total", "Samples consumed", scope=Scope.RANK)
    tokens: float = counter(
        "kdist_tokens_total",
        "Tokens consumed (absent if not a token model)",
        scope=Scope.RANK,
        quiet=True,
    )
    phase: list[float] = counter(
        "kdist_step_phase_seconds_total",
        "Step time by phase; the phases sum to the step time",
        scope=Scope.RANK,
        unit="seconds",
        labels=("phase",),
        series=tuple((phase.name.lower(),) for phase in StepPhase),
    )
    step_duration: list[float] = histogram(
        "kdist_step_duration_seconds",
        "Step wall time of every local rank",
        scope=Scope.NODE,
        unit="seconds",
        buckets=STEP_BUCKETS,
    )
    collective_seconds: list[float] = counter(
        "kdist_collective_seconds_total",
        (
            "Time with such a collective in flight, overlaps counted once, from launch to "
            "completion, waiting for peers included"
        ),
        scope=Scope.RANK,
        unit="seconds",
        labels=("op",),
        series=_OPS,
        quiet=True,
    )
    collective_bytes: list[float] = counter(
        "kdist_collective_bytes_total",
        "Payload bytes of collectives (the S of nccl-tests)",
        scope=Scope.RANK,
        unit="bytes",
        labels=("op",),
        series=_OPS,
        quiet=True,
    )
    collectives: list[float] = counter(
        "kdist_collectives_total",
        "Collectives completed",
        scope=Scope.RANK,
        labels=("op",),
        series=_OPS,
        quiet=True,
    )
    all_reduce_duration: list[float] = histogram(
        "kdist_allreduce_duration_seconds",
        (
            "Time of one all-reduce, launch to end, waiting for peers included (ddp, "
            "scripts); they overlap, so the sum is no time"
        ),
        scope=Scope.NODE,
        unit="seconds",
        buckets=ALL_REDUCE_BUCKETS,
        quiet=True,
    )
    nonfinite: list[float] = counter(
        "kdist_nonfinite_total",
        "Steps whose loss or gradient was NaN or infinite",
        scope=Scope.LEADER,
        labels=("kind",),
        series=(("loss",), ("grad",)),
    )
    wall: list[float] = counter(
        "kdist_wall_seconds_total",
        (
            "Partition of the agent's wall time; the categories sum to its life and those of "
            "the agents before it"
        ),
        scope=Scope.WITNESS,
        unit="seconds",
        labels=("category",),
        series=tuple((category,) for category in WALL_CATEGORIES),
    )
    checkpoint_attempts: list[float] = counter(
        "kdist_checkpoint_attempts_total",
        "Saves and restores begun and ended, failures included",
        scope=Scope.LEADER,
        labels=("op",),
        series=(("save",), ("restore",)),
    )
    checkpoint_failures: list[float] = counter(
        "kdist_checkpoint_failures_total",
        "Saves and restores that failed",
        scope=Scope.LEADER,
        labels=("op", "cause"),
        series=_FAILURES,
        quiet=True,
    )
    checkpoint_duration: list[float] = histogram(
        "kdist_checkpoint_duration_seconds",
        (
            "Duration of saves: blocking is the stall that training sees, total lasts until "
            "the commit is durable"
        ),
        scope=Scope.LEADER,
        unit="seconds",
        labels=("op", "mode"),
        series=(("save", "blocking"), ("save", "total")),
        buckets=SAVE_BUCKETS,
    )
    checkpoint_fallbacks: list[float] = counter(
        "kdist_checkpoint_fallbacks_total",
        "Checkpoints that a resume passed over because they were bad",
        scope=Scope.LEADER,
        labels=("cause",),
        series=_FALLBACKS,
        quiet=True,
    )
    loss: float | None = gauge(
        "kdist_loss",
        "Last training loss: the mean over all ranks, of a script what its rank 0 reports",
        scope=Scope.LEADER,
    )
    grad_norm: float | None = gauge(
        "kdist_grad_norm", "Last global gradient norm", scope=Scope.LEADER
    )
    learning_rate: float | None = gauge(
        "kdist_learning_rate", "Learning rate of parameter group 0", scope=Scope.LEADER
    )
    last_step: float | None = gauge("kdist_last_step", "Highest step completed", scope=Scope.NODE)
    target_steps: float | None = gauge(
        "kdist_target_steps", "Steps the run will do (absent if unknown)", scope=Scope.NODE
    )
    last_step_time: float | None = gauge(
        "kdist_last_step_timestamp_seconds",
        "Unix time of the last completed step",
        scope=Scope.NODE,
        unit="seconds",
    )
    step_ewma: float | None = gauge(
        "kdist_step_duration_ewma_seconds",
        "Smoothed step time of the slowest local rank",
        scope=Scope.NODE,
        unit="seconds",
    )
    checkpoint_bytes: float | None = gauge(
        "kdist_checkpoint_size_bytes",
        "Size of the last good checkpoint",
        scope=Scope.LEADER,
        unit="bytes",
    )
    checkpoint_time: float | None = gauge(
        "kdist_checkpoint_last_success_timestamp_seconds",
        "Unix time of the last durable save",
        scope=Scope.LEADER,
        unit="seconds",
    )
    checkpoint_step: float | None = gauge(
        "kdist_checkpoint_last_success_step", "Step of the last good save", scope=Scope.LEADER
    )
    checkpoint_interval: float | None = gauge(
        "kdist_checkpoint_interval_seconds",
        (
            "Time between two saves: the configured one, or that of the configured steps at "
            "the present pace"
        ),
        scope=Scope.LEADER,
        unit="seconds",
    )
    probe_bandwidth: float | None = gauge(
        "kdist_allreduce_probe_bus_bandwidth_bytes_per_second",
        (
            "Bus bandwidth of the last probe, all ranks together and nothing else going on: "
            "S/t * 2(n-1)/n"
        ),
        scope=Scope.LEADER,
        unit="bytes_per_second",
    )

    def add_step(self, seconds: float, samples: int, step: int) -> None:
        """Count one optimizer step of this rank: its wall time, its own samples, its number."""
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
        """Count a step's all-reduces: seconds with one in flight, the tail nothing hid (added to
        its phase), each one's time.
        """
        self.add_collectives(Op.ALL_REDUCE, busy=busy, nbytes=nbytes, count=len(durations))
        self.phase[StepPhase.COMM_EXPOSED] += exposed
        for seconds in durations:
            self.observe_all_reduce(seconds)

    def observe_all_reduce(self, seconds: float) -> None:
        """Count one all-reduce's time, from its launch to its end, in the histogram."""
        self.all_reduce_duration[bisect_left(ALL_REDUCE_BUCKETS, seconds)] += 1
        self.all_reduce_duration[-1] += seconds

    def add_collectives(self, op: Op, *, busy: float, nbytes: float, count: int) -> None:
        """Count a step's collectives of one kind: seconds with one in flight, payload, how many."""
        self.collective_seconds[op] += busy
        self.collective_bytes[op] += nbytes
        self.collectives[op] += count

    def add_nonfinite(self, kind: str) -> None:
        """Count a step whose `loss` or `grad` was not finite."""
        self.nonfinite[0 if kind == "loss" else 1] += 1

    def add_wall(self, category: str, seconds: float) -> None:
        """Say what the rank spent time on besides its steps, which need no saying. Raises
        `ValueError` if it is no `Wall`.
        """
        self.wall[WALL_CATEGORIES.index(category)] += seconds

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
        """Count a `save` or `restore`; `cause` is None if it succeeded. Seconds that training saw,
        and in all; bytes.
        """
        self.checkpoint_attempts[0 if op == "save" else 1] += 1
        if cause is not None:
            known = (op, cause) if (op, cause) in _FAILURES else (op, "other")
            self.checkpoint_failures[_FAILURES.index(known)] += 1
        elif op == "save":
            for start, seconds in ((0, visible), (_SAVE_SERIES, total)):
                self.checkpoint_duration[start + bisect_left(SAVE_BUCKETS, seconds)] += 1
                self.checkpoint_duration[start + _SAVE_SERIES - 1] += seconds
            self.checkpoint_bytes, self.checkpoint_time, self.checkpoint_step = (
                nbytes,
                time.time(),
                step,
            )

    def add_fallback(self, cause: str = "corrupt") -> None:
        """Count a checkpoint that a resume had to pass over."""
        known = (cause,) if (cause,) in _FALLBACKS else ("other",)
        self.checkpoint_fallbacks[_FALLBACKS.index(known)] += 1

"""Declares metrics: name, type, unit, labels and help.

`counter`, `gauge` and `histogram` declare fields of `StepStats`; the constants at the end are the
metrics of the agent itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kdist_trainer.network.server import Refused


class Kind(StrEnum):
    """How a metric behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """Where a metric's value comes from, and how an agent aggregates the records of its ranks."""

    RANK = "rank"
    """One series per local rank, with the label `rank`."""
    NODE = "node"
    """Counters and histograms are summed over the local ranks; of gauges the maximum is shown."""
    LOCAL_RANK_ZERO = "local rank 0"
    """The value of the node's first rank."""
    RANK_ZERO = "rank 0"
    """The value of global rank 0; only the agent that runs it shows the metric."""
    AGENT = "agent"
    """A value of the agent itself; no record carries it."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric family: its name, its meaning and its series."""

    name: str
    kind: Kind
    help: str
    scope: Scope = Scope.AGENT
    labels: tuple[str, ...] = ()
    """Labels in addition to `kdist_job`, and to `rank` if the scope is RANK."""
    series: tuple[tuple[str, ...], ...] = ((),)
    """Values of `labels`, one tuple per series; empty if they are only known at run time (metrics
    of the agent).
    """
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""
    hide_zero: bool = False
    """Whether a series is omitted while it is zero."""

    @property
    def unit(self) -> str:
        """The unit that the name ends with."""
        name = self.name.removesuffix("_total")
        units = ("bytes_per_second", "seconds", "bytes")
        return next((unit for unit in units if name.endswith(f"_{unit}")), "")

    @property
    def slots(self) -> int:
        """Number of values that the metric takes in a record. A histogram's series has the count of
        each bucket (not cumulative), that of +Inf, and the sum.
        """
        return len(self.series) * (len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1)


def counter(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """Declare a counter field of `StepStats`: a float, or a list of floats if it has several
    series.
    """
    return _field(Metric(name=name, kind=Kind.COUNTER, help=help, scope=scope, **metric))


def gauge(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """Declare a gauge field of `StepStats`: a float, `None` while unknown."""
    declared = Metric(name=name, kind=Kind.GAUGE, help=help, scope=scope, **metric)
    return dataclasses.field(default=None, metadata={"metric": declared})


def histogram(
    name: str,
    help: str,  # noqa: A002
    *,
    scope: Scope,
    buckets: tuple[float, ...],
    **metric: Any,
) -> Any:
    """Declare a histogram field of `StepStats`: a list of floats, see `Metric.slots`."""
    return _field(
        Metric(name=name, kind=Kind.HISTOGRAM, help=help, scope=scope, buckets=buckets, **metric)
    )


def _field(metric: Metric) -> Any:
    if metric.slots == 1:
        return dataclasses.field(default=0.0, metadata={"metric": metric})
    return dataclasses.field(
        default_factory=lambda: [0.0] * metric.slots, metadata={"metric": metric}
    )


STATES = (
    "pending",
    "rendezvous",
    "initializing",
    "running",
    "checkpointing",
    "restarting",
    "hung",
    "succeeded",
    "failed",
)
"""States of an agent; it is in exactly one at a time."""
STANDBY = "standby"
"""The state, in `/status` only, of an agent that the group has no place for: in metrics, where each
state is a series of every agent, it is `pending`.
"""


def _counter(name: str, help: str, **metric: Any) -> Metric:  # noqa: A002
    return Metric(name=name, kind=Kind.COUNTER, help=help, **metric)


def _gauge(name: str, help: str, **metric: Any) -> Metric:  # noqa: A002
    return Metric(name=name, kind=Kind.GAUGE, help=help, **metric)


BUILD_INFO = _gauge(
    "kdist_build_info",
    "Versions of kdist, torch and Python; the value is always 1",
    labels=("version", "torch_version", "python_version"),
    series=(),
)
JOB_INFO = _gauge(
    "kdist_job_info",
    "Configuration of this run; the value is always 1",
    labels=("framework", "workload_kind", "world_size_min", "world_size_max", "run_id"),
    series=(),
)
JOB_STATE = _gauge(
    "kdist_job_state",
    "Whether the agent is in this state (1) or not (0)",
    labels=("state",),
    series=tuple((s,) for s in STATES),
)
WORLD_SIZE = _gauge("kdist_world_size", "Number of ranks in the current worker group")
WORLD_SIZE_MAX = _gauge("kdist_world_size_max", "Maximum number of ranks of the job")
GENERATION = _gauge(
    "kdist_generation", "Generation of the worker group; incremented by each rendezvous"
)
HEARTBEAT = _gauge(
    "kdist_heartbeat_timestamp_seconds",
    "Unix time at which the agent received the last record of this rank",
    labels=("rank",),
    series=(),
)
LOST_STEPS = _counter(
    "kdist_lost_steps_total",
    "Optimizer steps repeated after a restart; counted by the agent that runs rank 0",
)
LOST_PROGRESS = _counter(
    "kdist_lost_progress_seconds_total",
    (
        "Productive time repeated after a restart (subtract it for goodput); counted by the "
        "agent that runs rank 0"
    ),
)
RESTARTS = _counter(
    "kdist_worker_group_restarts_total",
    "Restarts of the worker group after a failure",
    labels=("cause",),
    series=(),
)
WORKER_EXITS = _counter(
    "kdist_worker_exits_total",
    "Exits of worker processes, successful ones included",
    labels=("cause", "signal"),
    series=(),
)
COLLECTIVE_FAILURES = _counter(
    "kdist_collective_failures_total",
    "Collectives that raised an error, timed out or hung",
    labels=("op", "cause"),
    series=(),
)
RESTARTS_REMAINING = _gauge("kdist_restarts_remaining", "Restarts remaining before the job fails")
RENDEZVOUS_DURATION = Metric(
    name="kdist_rendezvous_duration_seconds",
    kind=Kind.HISTOGRAM,
    help="Duration of rendezvous",
    labels=("outcome",),
    series=(),
    buckets=(2.0, 30.0, 300.0),
)
TIME_TO_FIRST_STEP = _gauge(
    "kdist_time_to_first_step_seconds",
    "Time from the start of this generation's workers to their first step",
)
TIME_TO_RECOVER = _gauge(
    "kdist_time_to_recover_seconds",
    "Time from the detection of the last failure to the first step after it",
)
CHECKPOINT_AT_RISK = _gauge(
    "kdist_checkpoint_at_risk_seconds",
    (
        "Training time that no checkpoint holds, which a loss of all ranks now would cost; from "
        "the agent that runs rank 0, for jobs that save"
    ),
)
CHECKPOINT_LAST_DURATION = _gauge(
    "kdist_checkpoint_last_duration_seconds",
    "Time from the start of the last checkpoint until it was durable",
)
RECORDS = _counter(
    "kdist_exporter_records_total",
    "Records received from ranks",
    labels=("outcome",),
    series=(("accepted",), ("stale",), ("malformed",)),
)
REASONS = tuple(reason.value for reason in Refused)
CONNECTIONS_REFUSED = _counter(
    "kdist_connections_refused_total",
    "Connections that the agent has closed to stay within its bounds",
    labels=("server", "reason"),
    series=tuple((server, reason) for server in ("metrics", "exchange") for reason in REASONS),
)
SCRAPE_DURATION = _gauge(
    "kdist_exporter_scrape_duration_seconds",
    "Time that the agent took to answer the last scrape",
)

AGENT_METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All metrics of the agent itself, in the order of declaration."""

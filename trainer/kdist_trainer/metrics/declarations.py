"""Declares metrics: name, type, unit, labels and help, each in one place.

`counter`, `gauge` and `histogram` declare fields of `StepStats`; the constants below are the
metrics of the agent itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How a metric behaves over time."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """Whose number a metric shows, and how an agent makes it of its ranks' records."""

    RANK = "rank"
    """One series for each local rank, labelled `rank`."""
    NODE = "node"
    """Counters and histograms are the sum over the local ranks, gauges their largest."""
    WITNESS = "witness"
    """The first local rank speaks for the node."""
    LEADER = "leader"
    """Rank 0 speaks for the job; only the agent that has it shows the metric."""
    AGENT = "agent"
    """The agent itself knows it; it is in no record."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric family: what it is called, what it means and which series it has."""

    name: str
    kind: Kind
    help: str
    scope: Scope = Scope.AGENT
    unit: str = ""
    labels: tuple[str, ...] = ()
    """Labels besides `kdist_job`, and besides `rank` where the scope is RANK."""
    series: tuple[tuple[str, ...], ...] = ((),)
    """Values of `labels`, one tuple per series; empty where an agent's metric finds them as it
    goes.
    """
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, the infinite one left out."""
    quiet: bool = False
    """A series at zero is not shown."""

    @property
    def slots(self) -> int:
        """Numbers that the metric takes in a record: each bucket's own count, the infinite one's,
        then the sum.
        """
        return len(self.series) * (len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1)


def counter(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """A field of `StepStats` that only grows: a float, or a list of floats where there are several
    series.
    """
    return _field(Metric(name=name, kind=Kind.COUNTER, help=help, scope=scope, **metric))


def gauge(name: str, help: str, *, scope: Scope, **metric: Any) -> Any:  # noqa: A002
    """A field of `StepStats` that shows a state: a float, `None` while unknown."""
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
    """A field of `StepStats` that counts observations in buckets: a list of floats, see
    `Metric.slots`.
    """
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
"""What an agent can be doing; exactly one at a time."""


def _counter(name: str, help: str, **metric: Any) -> Metric:  # noqa: A002
    return Metric(name=name, kind=Kind.COUNTER, help=help, **metric)


def _gauge(name: str, help: str, **metric: Any) -> Metric:  # noqa: A002
    return Metric(name=name, kind=Kind.GAUGE, help=help, **metric)


BUILD_INFO = _gauge(
    "kdist_build_info",
    "Build and runtime versions",
    labels=("version", "torch_version", "python_version"),
    series=(),
)
JOB_INFO = _gauge(
    "kdist_job_info",
    "Static facts of this run",
    labels=("framework", "workload_kind", "world_size_min", "world_size_max", "run_id"),
    series=(),
)
JOB_STATE = _gauge(
    "kdist_job_state",
    "1 for the agent's current state, 0 for the others",
    labels=("state",),
    series=tuple((s,) for s in STATES),
)
WORLD_SIZE = _gauge("kdist_world_size", "Ranks in the current generation")
WORLD_SIZE_MAX = _gauge("kdist_world_size_max", "Most ranks that the job may have")
GENERATION = _gauge("kdist_generation", "Generation of the group: one more after each rendezvous")
HEARTBEAT = _gauge(
    "kdist_heartbeat_timestamp_seconds",
    "Unix time of the last record from this rank",
    unit="seconds",
    labels=("rank",),
    series=(),
)
LOST_STEPS = _counter(
    "kdist_lost_steps_total", "Steps done again after a restart, told by the agent that has rank 0"
)
LOST_PROGRESS = _counter(
    "kdist_lost_progress_seconds_total",
    (
        "Productive time done again after a restart (subtract it for goodput), told by the "
        "agent that has rank 0"
    ),
    unit="seconds",
)
RESTARTS = _counter(
    "kdist_worker_group_restarts_total",
    "Restarts of this agent's worker group",
    labels=("cause",),
    series=(),
)
WORKER_EXITS = _counter(
    "kdist_worker_exits_total",
    "Exits of this agent's workers, normal ones included",
    labels=("cause", "signal"),
    series=(),
)
COLLECTIVE_FAILURES = _counter(
    "kdist_collective_failures_total",
    "Collectives that a rank of this agent failed in: they raised, timed out or hung",
    labels=("op", "cause"),
    series=(),
)
RESTARTS_REMAINING = _gauge("kdist_restarts_remaining", "Restarts left in the job's budget")
RENDEZVOUS_DURATION = Metric(
    name="kdist_rendezvous_duration_seconds",
    kind=Kind.HISTOGRAM,
    help="Time to form a group",
    unit="seconds",
    labels=("outcome",),
    series=(),
    buckets=(2.0, 30.0, 300.0),
)
TIME_TO_FIRST_STEP = _gauge(
    "kdist_time_to_first_step_seconds",
    "Start of this generation's workers to their first step",
    unit="seconds",
)
TIME_TO_RECOVER = _gauge(
    "kdist_time_to_recover_seconds", "Failure detected to the first new step", unit="seconds"
)
RECORDS = _counter(
    "kdist_exporter_records_total",
    "Records received from workers",
    labels=("outcome",),
    series=(("accepted",), ("stale",), ("malformed",)),
)
SCRAPE_DURATION = _gauge(
    "kdist_exporter_scrape_duration_seconds", "Time to render the last scrape", unit="seconds"
)

AGENT_METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All of them, in the order of declaration."""

"""The metrics that an agent knows of itself, without its ranks' records."""

from __future__ import annotations

from typing import Any

from kdist_trainer.stats.metric import Kind, Metric

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
    "kdist_job_state", "1 for the agent's current state, 0 for the others", labels=("state",), series=tuple((s,) for s in STATES)
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
LOST_STEPS = _counter("kdist_lost_steps_total", "Steps done again after a restart, told by the agent that has rank 0")
LOST_PROGRESS = _counter(
    "kdist_lost_progress_seconds_total",
    "Productive time done again after a restart (subtract it for goodput), told by the agent that has rank 0",
    unit="seconds",
)
RESTARTS = _counter("kdist_worker_group_restarts_total", "Restarts of this agent's worker group", labels=("cause",), series=())
WORKER_EXITS = _counter(
    "kdist_worker_exits_total", "Exits of this agent's workers, normal ones included", labels=("cause", "signal"), series=()
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
    "kdist_time_to_first_step_seconds", "Start of this generation's workers to their first step", unit="seconds"
)
TIME_TO_RECOVER = _gauge("kdist_time_to_recover_seconds", "Failure detected to the first new step", unit="seconds")
RECORDS = _counter(
    "kdist_exporter_records_total",
    "Records received from workers",
    labels=("outcome",),
    series=(("accepted",), ("stale",), ("malformed",)),
)
SCRAPE_DURATION = _gauge("kdist_exporter_scrape_duration_seconds", "Time to render the last scrape", unit="seconds")

AGENT_METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order of declaration."""

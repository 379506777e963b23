"""The metrics of the agent itself, each declared once with its name, which ends with its unit, and
help. To add one, add a constant.
"""

from __future__ import annotations

from typing import Any

from kdist_trainer.metrics.metric import Kind, Metric
from kdist_trainer.network.server import Refused

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

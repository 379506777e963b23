"""The `/status` document of an agent, for `kdist run` and `kdist status`. Its fields:

- `format`: see `kdist_trainer.formats`. `job`, `run_id`, `node`, `pid`: identify the agent.
- `state`: one of `STATES`, or `standby`. `phase`: that of the first local rank; the state once the
  agent has ended.
- `generation`, `world_size`: the worker group.
- `step`, `target_steps`, `loss`, `learning_rate`, `last_checkpoint_step`, `last_checkpoint_time`
  (Unix time), `checkpoint_interval` (seconds between two saves now), `checkpoint_bytes` (of the
  last one): the latest reports; loss, learning rate and checkpoints only on the agent that runs
  rank 0. Until a group saves, the last checkpoint is the newest one as the group began.
- `samples_per_second`: throughput of this node.
- `restarts`, `lost_steps`: of the run, since it began; `restarts_remaining`: of the job;
  `wall_seconds`: by category.
- `at_risk_seconds`: the training time that no checkpoint holds and ranks hold in memory, on the
  agent that runs rank 0.
- `nodes`: the limits `min` and `max`. `ranks`: see `rank_entries`. `exit`: the exit record once the
  agent has ended.
- `peers`: the agents that the rendezvous lists, by address: those `heard`, those that are `silent`,
  and `age_seconds`, the time since the rendezvous was read. Null while that is unknown.
- `connections_refused`: the connections that the agent has closed since it started because there
  were too many, it had no resources for them, or they had a wrong token.
- `devices`: what the ranks of this node run on: `CPU`, or GPUs such as `8 x NVIDIA H100`; those
  that a script may use.
- `tracker`: the address of the run in its tracker, on the agent that has group rank 0.
- `rendezvous_refused`: whether the API server refuses this agent the rendezvous, which it has
  served before: the job's ServiceAccount or a right of it is gone.
- `rendezvous_refusal`: how it refuses it, with the status: 401 for the token, 403 for a right, 404
  for a ConfigMap that is gone.
- `exchange_key`: whether the key of the job's exchange is mounted. Null where agents need none.
- `last_failure`: what ended the latest worker group of this agent: `cause`, `message`, `rank`,
  `node`, `machine`, `step`, `time` (Unix time), `primary`. It stays until the next one. `full`: the
  folders that had no room then, in a sentence; `is_full`: whether one has none now.
- `failed_saves`: checkpoints that could not be saved since the last one that was, on the agent that
  runs rank 0; `checkpoint_room`: the room of their folder, while there are any.
- `waiting_for`: what the agent waits for before it tries again, in a sentence.
- `machine_faults`: the machines whose GPU or node has failed in this run, the latest at the end:
  `machine` (the name of the Kubernetes node, or of this host), `faults`, their number, and `cause`,
  `message` and `time` of the last one. It is read from the ledger as a worker group forms.
- `slow_start`: that starting takes longer than the time between losses, in a sentence with both
  times, while the ranks start.

All but the first group may be null.

`StatusSources` has the agent's own fields: each is a function that returns its present value and
waits for nothing. `RunCounts` counts on from what the run did before a worker group.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.metrics import agent_metrics
from kdist_trainer.metrics.aggregation import AgentMetrics, MetricsSnapshot
from kdist_trainer.metrics.rank_metrics import StepPhase
from kdist_trainer.metrics.transport import GAUGES, SLOTS
from kdist_trainer.network.server import Refused
from kdist_trainer.processes.liveness import Heartbeat, RankSnapshot, heartbeat_path


@dataclass
class StatusSources:
    """The functions, which the agent sets.

    Attributes:
        peers: The other agents; None while they are unknown.
        refused: The connections that the exchange has closed, by reason.
        refusal: How the API server refuses this agent the rendezvous; empty if it does not.
        has_key: Whether the key of the exchange is mounted; None where agents need none.
        activity: What the ranks do, by local rank.
        last_failure: The failure that ended the latest worker group; None without one.
        full: The folders that have no room, in a sentence; empty if all have.
        room: The room of the folder of the checkpoints, in a sentence.
        waiting_for: What the agent waits for before it tries again, in a sentence; empty if for
            nothing.
        devices: What the ranks of this node run on; empty before it is known.
        slow_start: That starting takes longer than the time between losses, in a sentence, while
            the ranks start; empty if it does not.
        tracker: The address of the run in its tracker; empty if it has none.
        machine_faults: The faults of machines of this run.
    """

    peers: Callable[[], dict[str, Any] | None] = lambda: None
    refused: Callable[[], Mapping[str, int]] = dict
    refusal: Callable[[], str] = str
    has_key: Callable[[], bool | None] = lambda: None
    activity: Callable[[], Mapping[int, Mapping[str, Any]]] = dict
    last_failure: Mapping[str, Any] | None = None
    full: Callable[[], str] = str
    room: Callable[[], str] = str
    waiting_for: str = ""
    devices: str = ""
    slow_start: str = ""
    tracker: str = ""
    machine_faults: Sequence[Mapping[str, Any]] = ()

    def fields(self, *, ended: bool, has_begun: bool, failed_saves: int) -> dict[str, Any]:
        """Fields of `/status`. `has_begun` says whether the ranks have reached a step;
        `failed_saves` counts the checkpoints that could not be saved since the last one.
        """
        last_failure = None
        if self.last_failure is not None:  # folders that were full then: have they room now?
            is_known = not ended and bool(self.last_failure.get("full"))
            is_full = bool(self.full()) if is_known else None
            last_failure = {**self.last_failure, "is_full": is_full}
        refusal = "" if ended else self.refusal()
        return {
            "peers": None if ended else self.peers(),
            "rendezvous_refused": bool(refusal),
            "rendezvous_refusal": refusal or None,
            "exchange_key": None if ended else self.has_key(),
            "last_failure": last_failure,
            "devices": self.devices or None,
            "tracker": self.tracker or None,
            "failed_saves": failed_saves,
            "checkpoint_room": self.room() if failed_saves and not ended else None,
            "waiting_for": None if ended else self.waiting_for or None,
            "machine_faults": list(self.machine_faults),
            "slow_start": None if ended or has_begun else self.slow_start or None,
        }


class RunCounts:
    """The restarts and lost steps of the run. Until the first group of this agent's process they
    are what the processes before it on this node have counted.
    """

    def __init__(self) -> None:
        self._restarts: int | None = None
        self._lost_steps = self._failures = 0
        self.committed: tuple[int | None, float | None] = (None, None)
        """Step and Unix time of the newest checkpoint as the latest group began, as far as they are
        known.
        """

    def begin(
        self, *, restarts: int, lost_steps: int, committed: tuple[int | None, float | None]
    ) -> None:
        """A worker group begins. `restarts` counts the groups that began after a failure, this one
        included, and `lost_steps` the steps lost so far.
        """
        self._restarts, self._lost_steps, self._failures = restarts, lost_steps, 0
        self.committed = committed

    def add_failure(self) -> None:
        """A failure has ended the group, and another one will follow."""
        self._failures = 1

    def end(self) -> None:
        """No other group follows."""
        self._failures = 0

    def fields(self, agent: AgentMetrics) -> dict[str, int]:
        if self._restarts is None:
            counters = {"restarts": agent_metrics.RESTARTS, "lost_steps": agent_metrics.LOST_STEPS}
            return {name: int(agent.total(metric)) for name, metric in counters.items()}
        return {"restarts": self._restarts + self._failures, "lost_steps": self._lost_steps}


_HOSTILE = (Refused.LIMIT, Refused.RESOURCES, Refused.TOKEN)
_WINDOW_SECONDS = 10.0
_SPACING_SECONDS = 0.5
_PHASE = SLOTS["kdist_step_phase_seconds_total"].start
_STEPS = SLOTS["kdist_steps_total"].start
_NONFINITE_LOSS = SLOTS["kdist_nonfinite_total"].start
_ALL_REDUCE = SLOTS["kdist_collective_seconds_total"].start
_BUSY = tuple(
    _PHASE + phase
    for phase in (StepPhase.DATA_WAIT, StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER)
)


def count_refused(refused: Mapping[str, Mapping[str, int]]) -> int:
    """The connections that an honest client would not have caused, of all servers of an agent."""
    return sum(reasons.get(reason, 0) for reasons in refused.values() for reason in _HOSTILE)


class FailedSaves:
    """Counts the saves that failed since the last checkpoint was committed."""

    def __init__(self) -> None:
        self._committed: float | None = None
        self._before = 0.0
        self.count = 0

    def add(self, committed: float | None, failures: float) -> None:
        """Update from a rank's report: the step of the last commit and all failures so far."""
        if committed != self._committed or failures < self._before:
            self._committed, self._before = committed, failures
        self.count = int(failures - self._before)


class Throughput:
    """Samples per second over the last `_WINDOW_SECONDS`, from a cumulative total."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def add(self, total: float, *, now: float) -> None:
        """Record the total at monotonic time `now`."""
        if not self._points or now - self._points[-1][0] >= _SPACING_SECONDS:
            self._points.append((now, total))
        self._forget(now)

    def rate(self, total: float, *, now: float) -> float | None:
        """Samples per second until `now`; None if nothing was recorded in the window."""
        self._forget(now)
        if not self._points or now - self._points[0][0] < _SPACING_SECONDS:
            return None
        since, before = self._points[0]
        return max(0.0, total - before) / (now - since)

    def _forget(self, now: float) -> None:
        while len(self._points) > 1 and now - self._points[0][0] > _WINDOW_SECONDS:
            self._points.popleft()


def training_fields(snapshot: MetricsSnapshot) -> dict[str, Any]:
    """The latest gauges of the training: a number, None while unknown, a string if not finite."""
    fields = {
        "step": "kdist_last_step",
        "target_steps": "kdist_target_steps",
        "loss": "kdist_loss",
        "learning_rate": "kdist_learning_rate",
        "last_checkpoint_step": "kdist_checkpoint_last_success_step",
        "last_checkpoint_time": "kdist_checkpoint_last_success_timestamp_seconds",
        "checkpoint_interval": "kdist_checkpoint_interval_seconds",
        "checkpoint_bytes": "kdist_checkpoint_size_bytes",
    }
    values = {field: snapshot.gauges[GAUGES[name]] for field, name in fields.items()}
    integers = {"step", "target_steps", "last_checkpoint_step"}
    return {
        field: int(value) if field in integers and value is not None else log.plain(value)
        for field, value in values.items()
    }


def nonfinite_loss(snapshot: MetricsSnapshot) -> dict[str, Any]:
    """What an exit record says of a loss that was NaN or infinite; empty if none was."""
    steps = max((int(one[_NONFINITE_LOSS]) for one in snapshot.by_rank.values()), default=0)
    if not steps:
        return {}
    last = snapshot.gauges[GAUGES["kdist_loss"]] if 0 in snapshot.local_ranks else None
    return {"nonfinite_loss": {"steps": steps, "last": log.plain(last)}}


_FIELDS = (
    "step",
    "step_seconds",
    "busy_seconds",
    "all_reduce_seconds",
    "phase",
    "heartbeat_age",
    "collective",
    "group",
    "ended",
    "quiet_seconds",
    "collective_seconds",
    "line",
    "line_seconds",
)
"""What is null in an entry until it is known."""


def rank_entries(
    snapshot: MetricsSnapshot,
    scratch: Path,
    *,
    now: float,
    activity: Mapping[int, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One entry per local rank.

    `phase`, `heartbeat_age` and `collective` (such as `all_reduce(float32[1024]) #17`) come from
    the rank's heartbeat; a script has a phase only if it reports. `group` is whether a rank of a
    script has formed a process group with others, where that is known. `busy_seconds` and
    `all_reduce_seconds` are means per step of this generation: time without waiting for peers, and
    time with an all-reduce in flight. From the agent: `ended`, whether the rank has exited;
    `quiet_seconds`, the time since it has sent a heartbeat, or a collective of it began or ended;
    `collective_seconds`, the time that it has been in its collective; `line` and `line_seconds`,
    where its main thread stands and for how long, of a rank that is quiet and in no collective.
    """
    found = []
    for local_rank, rank in enumerate(snapshot.local_ranks):
        entry: dict[str, Any] = {"rank": rank, "local_rank": local_rank, **dict.fromkeys(_FIELDS)}
        if record := snapshot.current.get(rank):
            step, seconds = (
                record.gauges[GAUGES["kdist_last_step"]],
                record.gauges[GAUGES["kdist_step_duration_ewma_seconds"]],
            )
            steps = record.counters[_STEPS]
            entry["step"] = None if step is None else int(step)
            entry["step_seconds"] = log.plain(seconds)
            busy = sum(record.counters[slot] for slot in _BUSY)
            # a script measures none of its phases
            entry["busy_seconds"] = busy / steps if steps and busy else None
            entry["all_reduce_seconds"] = (
                record.counters[_ALL_REDUCE] / steps
                if steps and record.counters[_ALL_REDUCE]
                else None
            )
        if beat := read_heartbeat(scratch, local_rank):
            entry["collective"] = beat.collective
            entry["group"] = beat.group
            if beat.count:
                entry["phase"] = str(beat.phase)
                entry["heartbeat_age"] = round(max(0.0, now - beat.time_ns / 1e9), 3)
        found.append({**entry, **activity.get(local_rank, {})})
    return found


def is_seen(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of `rank_entries` was seen in a collective, or has sent a heartbeat: a script may
    report no steps.
    """
    return any(rank.get("quiet_seconds") is not None for rank in ranks)


def read_heartbeat(scratch: Path, local_rank: int) -> RankSnapshot | None:
    """What a local rank has written last, of a script perhaps collectives without heartbeats; None
    if there is nothing.
    """
    try:
        with contextlib.closing(Heartbeat(heartbeat_path(scratch, local_rank))) as heartbeat:
            return heartbeat.read()
    except (OSError, ValueError):
        return None

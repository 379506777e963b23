"""The status of a job, independent of its workload kind: phase, reason, nodes and pods."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from kdist.status.agent_status import LastFailure, RankStatus
from kdist.status.pods import ExitRecord, FetchProgress, Pod
from kdist.status.resource_state import ResourceState
from kdist.units import camel_case

API_VERSION = "cli.kdist.dev/v1"


@dataclass(frozen=True)
class WorkloadState:
    """State of a workload, whatever its kind.

    Attributes:
        active: pods that run or wait.
        ready: pods that are ready.
        succeeded: pods that succeeded.
        failed: pods that failed.
        suspended: whether the workload keeps no pods for now.
        finished: its result; None before it has finished.
        reason: its own reason for having finished, or for not running.
        message: its own message about that.
    """

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    suspended: bool = False
    finished: Literal["succeeded", "failed"] | None = None
    reason: str = ""
    message: str = ""


class Phase(StrEnum):
    """What a job is doing."""

    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    UNKNOWN = "Unknown"

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True)
class Nodes:
    """Nodes of a job: `ready` are running, at least `min` are needed, at most `max` are used."""

    ready: int
    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.ready}/{self.max}"


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment. Unknown values are None.

    Attributes:
        reason: a CamelCase word for why the job is in its phase; empty if there is nothing to add.
        message: a sentence about that.
        throughput: samples per second, of all ranks.
        lost_steps: steps that were repeated after restarts.
        last_checkpoint_time: unix seconds.
        at_risk: seconds of training that no checkpoint holds: a loss of all ranks now costs them.
        checkpoint_interval: seconds between two saves as it is now.
        checkpoint_bytes_per_hour: what checkpoints write at this interval.
        devices: what the ranks of each node run on.
        created: unix seconds; `age` is in seconds.
        kept_alive: whether pods stay alive after the training has ended.
        location: `cluster`, or `local` for a run on this machine.
        resource: state of the job's TrainingJob; None if it was applied without one.
        fetch: how far the node is that has most data or weights to fetch; None if none fetches.
        last_failure: what ended the latest worker group, as its agents tell; None without one.
        failed_saves: checkpoints that could not be saved since the last one that was.
        checkpoint_room: the room of their folder, in a sentence, while there are any.
        waiting_for: what an agent waits for before it tries again; empty if for nothing.
        slow_start: that starting takes longer than the time between losses, in a sentence with both
            times; empty if that is not so.
    """

    name: str
    namespace: str
    backend: str
    phase: Phase
    reason: str
    message: str
    nodes: Nodes
    run_id: str = ""
    generation: int = 0
    world_size: int = 0
    devices: str = ""
    step: int | None = None
    target_steps: int | None = None
    loss: float | None = None
    learning_rate: float | None = None
    throughput: float | None = None
    restarts: int = 0
    restarts_left: int | None = None
    lost_steps: int = 0
    last_checkpoint_step: int | None = None
    last_checkpoint_time: float | None = None
    at_risk: float | None = None
    checkpoint_interval: float | None = None
    checkpoint_bytes_per_hour: float | None = None
    all_reduce_seconds: float | None = None
    queue: str = ""
    created: float | None = None
    age: float | None = None
    kept_alive: bool = False
    ranks: tuple[RankStatus, ...] = ()
    pods: tuple[Pod, ...] = ()
    exit_record: ExitRecord | None = None
    location: Literal["cluster", "local"] = "cluster"
    resource: ResourceState | None = None
    fetch: FetchProgress | None = None
    last_failure: LastFailure | None = None
    failed_saves: int = 0
    checkpoint_room: str = ""
    waiting_for: str = ""
    slow_start: str = ""

    def to_document(self) -> dict[str, Any]:
        """Return the status for programs: names in camelCase; fields are only ever added."""
        document = {camel_case(key): _plain(value) for key, value in asdict(self).items()}
        document["terminal"] = self.phase.terminal
        return {"apiVersion": API_VERSION, "kind": "JobStatus", **document}


def _plain(value: Any) -> Any:
    """Convert a value to what JSON and YAML can represent."""
    if isinstance(value, dict):
        return {camel_case(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Phase) else value

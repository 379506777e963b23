"""What a job is doing, whatever kind of workload it runs as."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from kdist.status.pod import Pod
from kdist.status.record import ExitRecord
from kdist.status.report import Rank

API_VERSION = "cli.kdist.dev/v1"


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
        """Whether nothing more happens by itself."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True)
class Nodes:
    """Nodes of a job: `ready` are at work, at least `min` are needed, `max` are wanted."""

    ready: int
    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.ready}/{self.max}"


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment. What nobody knows is None; times are unix seconds, `throughput` is in samples per second."""

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
    all_reduce_seconds: float | None = None
    queue: str = ""
    created: float | None = None
    age: float | None = None
    parked: bool = False
    ranks: tuple[Rank, ...] = ()
    pods: tuple[Pod, ...] = ()
    exit_record: ExitRecord | None = None

    def to_document(self) -> dict[str, Any]:
        """The status for programs: camelCase, fields are only ever added."""
        document = {_camel(key): _plain(value) for key, value in asdict(self).items()}
        document["terminal"] = self.phase.terminal
        return {"apiVersion": API_VERSION, "kind": "JobStatus", **document}


def _camel(key: str) -> str:
    head, *rest = key.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _plain(value: Any) -> Any:
    """The value as JSON and YAML can hold it."""
    if isinstance(value, dict):
        return {_camel(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Phase) else value

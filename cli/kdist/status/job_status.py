"""The status of a job, independent of its workload kind: phase, reason, nodes and pods. The phase
is decided from the strongest evidence down: the workload's end, the user's requests, agents, pods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from kdist.status.agent_status import MEETING, WORKING, AgentStatus, RankStatus, latest
from kdist.status.exit_record import STOPPED, ExitRecord
from kdist.status.pod import Pod


@dataclass(frozen=True)
class WorkloadState:
    """State of a workload. Counts are of pods; `finished` is None while it is at work or waits.

    `reason` and `message` are the workload's own, of its end or of what keeps it from working.
    """

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    suspended: bool = False
    finished: Literal["succeeded", "failed"] | None = None
    reason: str = ""
    message: str = ""


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
    """A job at one moment. What nobody knows is None; times are unix seconds, `throughput` is in
    samples per second.
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
    ranks: tuple[RankStatus, ...] = ()
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


_STARTING_SECONDS = 90.0  # an agent that loads torch from a slow disk answers nothing so long


@dataclass(frozen=True)
class Evidence:
    """All that the decision looks at. `asked` is what the user asked for last, `queue` the queue
    that admits the job.

    `ttl` is after how many seconds the cluster deletes a workload that has ended; None where it
    never does.
    """

    state: WorkloadState | None
    pods: Sequence[Pod]
    reports: Mapping[str, AgentStatus]
    nodes: Nodes
    asked: str
    queue: str
    record: ExitRecord | None
    now: float
    ttl: int | None = None

    @property
    def working(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.working]

    @property
    def alive(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.over]


@dataclass(frozen=True)
class Verdict:
    """A phase, a word for the reason, and a sentence; the latter two are empty where there is
    nothing to add.
    """

    phase: Phase
    reason: str = ""
    message: str = ""


def decide(seen: Evidence) -> Verdict:
    """The phase."""
    return _decide_end(seen) or _decide_rest(seen) or _decide_work(seen)


def _decide_end(seen: Evidence) -> Verdict | None:
    """The job is over: its workload says so, or agents that stay after their end do."""
    state, record = seen.state, seen.record
    if state is None:
        return None if seen.alive else Verdict(Phase.UNKNOWN, "NoWorkload", _say_gone(seen.ttl))
    if state.finished == "succeeded":
        return Verdict(Phase.SUCCEEDED, state.reason, state.message)
    if state.finished == "failed":
        if seen.asked == "stopped" or _all_stopped(seen):
            return Verdict(Phase.STOPPED, "Stopped", "stopped on request, its state is saved")
        if record and record.permanent:
            return Verdict(
                Phase.FAILED, record.cause or state.reason, record.message or state.message
            )
        return Verdict(
            Phase.FAILED, state.reason or (record.cause if record else ""), state.message
        )
    parked = [report for report in seen.reports.values() if report.parked]
    failed = [report for report in parked if report.state == "failed"]
    if failed:
        said = next((report.exit for report in failed if report.exit), record)
        return Verdict(Phase.FAILED, said.cause if said else "", said.message if said else "")
    if parked and len(parked) == len(seen.working):
        return Verdict(Phase.SUCCEEDED, "Parked", "done; its pods wait to be taken away")
    return None


def _say_gone(ttl: int | None) -> str:
    why = (
        ""
        if ttl is None
        else f", or deleted by the cluster {ttl:,} s after its end (ttlSecondsAfterFinished)"
    )
    return f"its workload is not there: it was refused, or deleted by somebody{why}; its run stays"


def _all_stopped(seen: Evidence) -> bool:
    """Whether every pod ended with the code of a request to stop."""
    codes = [pod.ended.code for pod in seen.pods if pod.ended]
    return bool(codes) and len(codes) == len(seen.pods) and all(code == STOPPED for code in codes)


def _decide_rest(seen: Evidence) -> Verdict | None:
    """The job rests: on request, or because its queue holds it."""
    if seen.state is None or not (seen.state.suspended or seen.asked):
        return None
    if not seen.state.suspended and seen.alive:
        return None
    if seen.alive:
        what = "Stopping" if seen.asked == "stopped" else "Suspending"
        return Verdict(
            Phase.RUNNING if seen.working else Phase.SUSPENDED, what, "its pods save and end"
        )
    if seen.asked == "stopped":
        return Verdict(Phase.STOPPED, "Stopped", "stopped on request, its state is saved")
    if seen.asked == "suspended":
        return Verdict(Phase.SUSPENDED, "Suspended", "suspended on request")
    if seen.queue:
        return Verdict(
            Phase.QUEUED,
            seen.state.reason or "Queued",
            seen.state.message or f"waits in the queue {seen.queue}",
        )
    return (
        Verdict(Phase.SUSPENDED, "Suspended", seen.state.message) if seen.state.suspended else None
    )


def _decide_work(seen: Evidence) -> Verdict:
    """The job is at work, or on its way to it."""
    working = seen.working
    reports = latest(
        {pod.name: seen.reports[pod.name] for pod in working if pod.name in seen.reports}
    )
    if any(report.state in WORKING for report in reports):
        return _running(seen, len(working))
    if any(report.state == "hung" for report in reports):
        return Verdict(Phase.RECOVERING, "Hang", "ranks stood still and are stopped")
    if any(report.state == "restarting" for report in reports):
        return Verdict(
            Phase.RECOVERING,
            "Restarting",
            "the ranks of a failed group are stopped, then a new group forms",
        )
    again = _has_history(seen)
    if any(report.state in MEETING for report in reports):
        return _meeting(reports, seen.nodes, again=again)
    if any(report.state == "succeeded" for report in reports):
        return Verdict(Phase.RUNNING, "Finishing", "the training is done, its pods end")
    if working:
        return _silent(seen, working, again=again)
    if any(pod.lost for pod in seen.pods):
        return Verdict(Phase.RECOVERING, "NodeLost", "no pod is on a node that answers")
    return _not_running(seen, again=again)


def _running(seen: Evidence, working: int) -> Verdict:
    if any(pod.lost for pod in seen.pods):
        return Verdict(
            Phase.RUNNING, "NodeLost", f"goes on with {working} nodes: one is not heard of"
        )
    if working < seen.nodes.max:
        return Verdict(
            Phase.RUNNING, "Smaller", f"{working} of at most {seen.nodes.max} nodes are there"
        )
    return Verdict(Phase.RUNNING)


def _has_history(seen: Evidence) -> bool:
    """Whether the job has been at work before."""
    if any(
        report.generation > 1 or report.restarts or report.step or report.checkpoint_step
        for report in seen.reports.values()
    ):
        return True
    failed = bool(seen.state and seen.state.failed)
    return failed or any(
        pod.restarts or pod.ended or pod.before or (pod.lost and pod.started) for pod in seen.pods
    )


def _meeting(reports: Sequence[AgentStatus], nodes: Nodes, *, again: bool) -> Verdict:
    meeting = sum(report.state == "rendezvous" for report in reports)
    phase = Phase.RECOVERING if again else Phase.STARTING
    if meeting:
        return Verdict(
            phase, "Rendezvous", f"{meeting} of {nodes.max} nodes are there, {nodes.min} needed"
        )
    return Verdict(phase, "Initializing", "the ranks start and load the workload")


def _silent(seen: Evidence, working: Sequence[Pod], *, again: bool) -> Verdict:
    """Containers run and nobody answers: still loading, or out of reach."""
    ages = [seen.now - pod.started for pod in working if pod.started is not None]
    if not ages or max(ages) < _STARTING_SECONDS:
        return Verdict(
            Phase.RECOVERING if again else Phase.STARTING, "Loading", "the agents load torch"
        )
    if len(working) < seen.nodes.min:
        waits = f"{len(working)} of {seen.nodes.min} needed nodes run"
        return Verdict(Phase.RECOVERING if again else Phase.PENDING, "TooFewNodes", waits)
    return Verdict(
        Phase.RUNNING, "NoAnswer", "its pods run, but their agents do not answer from here"
    )


def _not_running(seen: Evidence, *, again: bool) -> Verdict:
    alive = seen.alive
    if not alive:
        message = "its pods are not made yet"
        return Verdict(
            Phase.RECOVERING if again else Phase.PENDING,
            (seen.state and seen.state.reason) or "NoPods",
            message,
        )
    worst = next((pod for pod in alive if pod.troubled), alive[0])
    if again:
        return Verdict(Phase.RECOVERING, worst.state, worst.message)
    return Verdict(
        Phase.STARTING if worst.scheduled and not worst.troubled else Phase.PENDING,
        worst.state,
        worst.message,
    )

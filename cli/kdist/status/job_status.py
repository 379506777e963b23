"""The status of a job, independent of its workload kind, and the decision about its phase: from the
strongest evidence down, that is the workload's end, the user's requests, agents, pods.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from kdist.manifest import find_owner
from kdist.status import documents
from kdist.status.agent_status import (
    JOINING_STATES,
    RUNNING_STATES,
    AgentStatus,
    LastFailure,
    MachineFaults,
    RankStatus,
    clamp_faults,
    newest_generation,
)
from kdist.status.documents import Document
from kdist.status.pods import (
    STOPPED,
    ExitRecord,
    FetchProgress,
    Pod,
    describe_fetching,
    describe_saved,
    explain_permanent_failure,
    find_permanent_failure,
)
from kdist.status.resource_state import ResourceState
from kdist.units import camel_case, moment
from kdist_trainer.formats import CLI_API_VERSION


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
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)

    @property
    def waiting(self) -> bool:
        """Whether such a job may wait for something that a diagnosis can name."""
        return self in (
            Phase.PENDING,
            Phase.QUEUED,
            Phase.STARTING,
            Phase.RECOVERING,
            Phase.UNKNOWN,
        )


@dataclass(frozen=True)
class Nodes:
    """Nodes of a job: `ready` are running, at least `min` are needed, at most `max` are used."""

    ready: int
    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.ready}/{self.max}"


AVOIDED: Final = "kdist.dev/avoided"
"""Annotation of the Job that keeps a job's pods from a node: an `AvoidedNode` as JSON."""
_LATEST: Final = 2.0**33
_LONGEST_NODE: Final = 253


@dataclass(frozen=True)
class AvoidedNode:
    """A node that a job's pods stay away from until a time, in unix seconds, and why. `faults` are
    those that the controller has counted on it; None if a person asked.
    """

    node: str
    until: float
    reason: str = ""
    faults: int | None = None

    @classmethod
    def read(cls, marker: Document, *, job: str) -> AvoidedNode | None:
        """What an object says of a node; None if it keeps no pod away, because its own has ended or
        was never made, or is no marker of this job.
        """
        if not documents.integer(marker, "status", "active") or find_owner(marker, "Job") != job:
            return None
        found = documents.parse(documents.annotation(marker, AVOIDED))
        until = documents.number(found, "until") or 0.0
        until = until if 0 <= until < _LATEST else 0.0  # whoever may change the Job can write it
        if not 0 < len(documents.text(found, "node")) <= _LONGEST_NODE:
            return None
        faults = documents.integer(found, "faults")
        faults = None if faults is None else clamp_faults(faults)
        return cls(**documents.read_fields(cls, found, until=until, faults=faults))

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.node} until {moment(self.until)}{reason}"


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
        tracker: the address of the run in its tracker; empty if it has none.
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
        avoided: the nodes that its pods stay away from.
        machine_faults: how often GPUs and nodes have failed, the latest machine at the end.
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
    tracker: str = ""
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
    avoided: tuple[AvoidedNode, ...] = ()
    machine_faults: tuple[MachineFaults, ...] = ()

    def __repr__(self) -> str:
        found = {"step": self.step, "loss": self.loss, "checkpoint": self.last_checkpoint_step}
        known = "".join(f", {name} {value}" for name, value in found.items() if value is not None)
        return f"<JobStatus {self.name}: {self.phase}, {self.nodes} nodes{known}>"

    def to_document(self) -> dict[str, Any]:
        document = {camel_case(key): _plain(value) for key, value in asdict(self).items()}
        document["terminal"] = self.phase.terminal
        return {"apiVersion": CLI_API_VERSION, "kind": "JobStatus", **document}


def _plain(value: Any) -> Any:
    """Convert a value to what JSON and YAML can represent."""
    if isinstance(value, dict):
        return {camel_case(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Phase) else value


REFUSED = "RendezvousRefused"
ASKED_TO_START = "StartRequested"
_START_SECONDS = 300.0
STARTING_SECONDS = 90.0
"""Seconds that an agent may take to answer: it loads torch, perhaps from a slow disk."""


def explains_start(asked_at: float | None, now: float) -> bool:
    """Whether a request to start again explains what the job does now. One from the future, by more
    than clocks differ, explains nothing: whoever may change the ConfigMap can write it.
    """
    return asked_at is not None and abs(now - asked_at) < _START_SECONDS


@dataclass(frozen=True)
class Evidence:
    """Inputs of the phase decision.

    Attributes:
        state: state of the workload; None if it does not exist.
        pods: pods of the job.
        reports: status of each agent that answers, by pod.
        nodes: nodes of the job.
        asked: what the user requested last, such as `suspended`; empty if it is to run.
        queue: name of the queue that admits the job; empty without one.
        record: the exit record that explains the end; None without one.
        now: unix seconds.
        ttl: seconds after which the cluster deletes a finished workload; None if never.
        resource: state of its TrainingJob; None without one.
        started: when a user last had it start again (unix seconds); None if never.
        unasked: number of agents that nobody has asked.
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
    resource: ResourceState | None = None
    started: float | None = None
    unasked: int = 0

    @property
    def working(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.working]

    @property
    def alive(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.over]


class PhaseDecision(NamedTuple):
    """A phase, with a reason and a message where there is something to add."""

    phase: Phase
    reason: str = ""
    message: str = ""


def decide(evidence: Evidence) -> PhaseDecision:
    """Decide the phase from the strongest evidence there is."""
    return _decide_finished(evidence) or _decide_suspended(evidence) or _decide_active(evidence)


def _decide_finished(evidence: Evidence) -> PhaseDecision | None:
    """The phase of a job that has ended, by its workload or by agents that stay alive after it."""
    state, record = evidence.state, evidence.record
    if state is None:
        if evidence.alive:
            return None
        if (start := _decide_start(evidence)) is not None:
            return start
        if evidence.resource is None:
            expired = ""
            if evidence.ttl is not None:
                expired = f", or expired {evidence.ttl:,} s after its end (ttlSecondsAfterFinished)"
            message = f"{NO_WORKLOAD}: it was rejected or deleted{expired}; its run stays"
            return PhaseDecision(Phase.UNKNOWN, "NoWorkload", message)
        phase, reason, message = evidence.resource.explain(evidence.now)
        known = Phase(phase) if phase in set(Phase) else Phase.PENDING
        return PhaseDecision(known, reason, message)
    if state.finished == "succeeded":
        return PhaseDecision(Phase.SUCCEEDED, state.reason, state.message)
    if state.finished == "failed":
        codes = [pod.ended.code for pod in evidence.pods if pod.ended]
        if (
            bool(codes)
            and len(codes) == len(evidence.pods)
            and all(code == STOPPED for code in codes)
        ):
            saved = describe_saved(pod.record.step if pod.record else None for pod in evidence.pods)
            return PhaseDecision(Phase.STOPPED, "Stopped", f"stopped on request; {saved}")
        if record and record.permanent:
            return PhaseDecision(
                Phase.FAILED, record.cause or state.reason, record.message or state.message
            )
        return PhaseDecision(
            Phase.FAILED, state.reason or (record.cause if record else ""), state.message
        )
    if pod := find_permanent_failure(evidence.alive):
        return PhaseDecision(Phase.FAILED, *explain_permanent_failure(pod))
    finished = [report for report in evidence.reports.values() if report.finished]
    failed = [report for report in finished if report.state == "failed"]
    if failed:
        found = next((report.exit for report in failed if report.exit), record)
        return PhaseDecision(
            Phase.FAILED, found.cause if found else "", found.message if found else ""
        )
    if finished and len(finished) == len(evidence.working):
        return PhaseDecision(Phase.SUCCEEDED, "KeptAlive", "done; its pods wait to be deleted")
    return None


def _decide_suspended(evidence: Evidence) -> PhaseDecision | None:
    """The phase of a job that is suspended, on request or by its queue."""
    if evidence.state is None or not (evidence.state.suspended or evidence.asked):
        return None
    if not evidence.state.suspended and evidence.alive:
        return None
    if (started := _decide_start(evidence)) is not None:
        return started
    if evidence.alive:
        return PhaseDecision(
            Phase.RUNNING if evidence.working else Phase.SUSPENDED,
            "Suspending",
            "its pods save and end",
        )
    if evidence.asked:
        return PhaseDecision(Phase.SUSPENDED, "Suspended", "suspended on request")
    if evidence.queue:
        return PhaseDecision(
            Phase.QUEUED,
            evidence.state.reason or "Queued",
            evidence.state.message or f"waits in the queue {evidence.queue}",
        )
    return (
        PhaseDecision(Phase.SUSPENDED, "Suspended", evidence.state.message)
        if evidence.state.suspended
        else None
    )


def _decide_start(evidence: Evidence) -> PhaseDecision | None:
    """The phase of a job that a user has just restarted, until there are new pods."""
    if evidence.asked or not explains_start(evidence.started, evidence.now):
        return None
    if evidence.alive:
        phase = Phase.RUNNING if evidence.working else Phase.RECOVERING
        return PhaseDecision(
            phase, ASKED_TO_START, "its pods save and end, then it starts again, as asked"
        )
    return PhaseDecision(
        Phase.RECOVERING, ASKED_TO_START, "it starts again, as asked: its pods are created again"
    )


LOADS: Final = "the agents load torch"
NO_WORKLOAD: Final = "its workload does not exist"
JOINED: Final = "the ranks start and load the workload"
"""What agents do before their ranks train."""


def describe_joined(joined: int, of: int, needed: int) -> str:
    """How many nodes are at the rendezvous."""
    return f"{joined} of {of} nodes joined, {needed} needed"


def decide_by_states(states: Collection[str], running: int, most: int) -> PhaseDecision | None:
    """The phase that states of agents decide alone, wherever they run: that ranks train, on
    `running` of at most `most` nodes, or that they are stopped.
    """
    if any(state in RUNNING_STATES for state in states):
        if running < most:
            smaller = f"runs on {running} of at most {most} nodes"
            return PhaseDecision(Phase.RUNNING, "Smaller", smaller)
        return PhaseDecision(Phase.RUNNING)
    if "hung" in states:
        return PhaseDecision(Phase.RECOVERING, "Hang", "ranks hang and are stopped")
    if "restarting" in states:
        words = "the ranks of a failed group are stopped, then a new group forms"
        return PhaseDecision(Phase.RECOVERING, "Restarting", words)
    return None


def _decide_active(evidence: Evidence) -> PhaseDecision:
    working = evidence.working
    reports = newest_generation(
        {pod.name: evidence.reports[pod.name] for pod in working if pod.name in evidence.reports}
    )
    if any(report.state in RUNNING_STATES for report in reports):
        running = len(working)
        if any(report.refused for report in evidence.reports.values()):
            return PhaseDecision(Phase.RUNNING, REFUSED, "the API server refuses its agents")
        if any(pod.lost for pod in evidence.pods):
            return PhaseDecision(
                Phase.RUNNING, "NodeLost", f"continues with {running} nodes: one does not respond"
            )
    states = [report.state for report in reports]
    if (found := decide_by_states(states, len(working), evidence.nodes.max)) is not None:
        return found
    has_run = _has_history(evidence)
    if any(report.state in JOINING_STATES for report in reports):
        joined = sum(report.state == "rendezvous" for report in reports)
        phase = Phase.RECOVERING if has_run else Phase.STARTING
        if joined:
            words = [describe_joined(joined, evidence.nodes.max, evidence.nodes.min)]
            words += filter(None, [describe_fetching(evidence.alive)])
            return PhaseDecision(phase, "Rendezvous", "; ".join(words))
        return PhaseDecision(phase, "Initializing", JOINED)
    if any(report.state == "succeeded" for report in reports):
        return PhaseDecision(Phase.RUNNING, "Finishing", "the training is done, its pods end")
    if working:
        return _unanswered(evidence, working, has_run=has_run)
    if any(pod.lost for pod in evidence.pods):
        return PhaseDecision(Phase.RECOVERING, "NodeLost", "none of its nodes responds")
    alive = evidence.alive
    if not alive:
        message = "its pods are not created yet"
        return PhaseDecision(
            Phase.RECOVERING if has_run else Phase.PENDING,
            (evidence.state and evidence.state.reason) or "NoPods",
            message,
        )
    if not any(pod.troubled for pod in alive) and (fetching := describe_fetching(alive)):
        return PhaseDecision(Phase.RECOVERING if has_run else Phase.STARTING, "Fetching", fetching)
    worst = next((pod for pod in alive if pod.troubled), alive[0])
    if has_run:
        return PhaseDecision(Phase.RECOVERING, worst.state, worst.message)
    return PhaseDecision(
        Phase.STARTING if worst.scheduled and not worst.troubled else Phase.PENDING,
        worst.state,
        worst.message,
    )


def _has_history(evidence: Evidence) -> bool:
    if any(
        report.generation > 1 or report.restarts or report.step or report.checkpoint_step
        for report in evidence.reports.values()
    ):
        return True
    failed = bool(evidence.state and evidence.state.failed)
    return failed or any(
        pod.restarts or pod.ended or pod.before or (pod.lost and pod.started)
        for pod in evidence.pods
    )


def _unanswered(evidence: Evidence, working: Sequence[Pod], *, has_run: bool) -> PhaseDecision:
    """The phase where containers run but no agent answers: it loads, is unreachable, or was not
    asked.
    """
    ages = [evidence.now - pod.started for pod in working if pod.started is not None]
    is_unknown = evidence.unasked >= len(working)
    unknown = "its pods run; what their agents do is not known yet"
    if not ages or max(ages) < STARTING_SECONDS:
        return PhaseDecision(
            Phase.RECOVERING if has_run else Phase.STARTING,
            "Loading",
            unknown if is_unknown else LOADS,
        )
    if len(working) < evidence.nodes.min:
        message = f"{len(working)} of {evidence.nodes.min} needed nodes run"
        return PhaseDecision(Phase.RECOVERING if has_run else Phase.PENDING, "TooFewNodes", message)
    unreachable = "its pods run, but their agents cannot be reached from here"
    return PhaseDecision(Phase.RUNNING, "NoAnswer", unknown if is_unknown else unreachable)

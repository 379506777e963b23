"""The status of a TrainingJob: phase, conditions and numbers, computed from the observed state and
the decision about it, and the events that announce its changes.

Conditions follow the conventions of Kubernetes: `merge_conditions` keeps the transition time of a
condition whose status stays the same.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import islice
from typing import Any, Final, NamedTuple

from kdist.backends import Placement, warn_of_size
from kdist.diagnose import Diagnosis, diagnose
from kdist.errors import InvalidJobError, KdistError
from kdist.manifest import ForeignError, job_selector
from kdist.spec import TrainingJob
from kdist.status import JobStatus, Phase, documents
from kdist.status.documents import Document
from kdist_controller.actions import Action, Changes, Notice
from kdist_controller.observation import Observed
from kdist_controller.resource import describe_differences
from kdist_trainer.formats import seconds_left


class Condition(NamedTuple):
    """One condition."""

    type: str
    status: bool
    reason: str
    message: str


def find_condition(status: Document, kind: str) -> Document:
    """The condition of this type in a status; empty if there is none."""
    return documents.condition({"status": status}, kind)


def is_true(status: Document, kind: str) -> bool:
    """Whether the condition of this type is true."""
    return find_condition(status, kind).get("status") == "True"


def merge_conditions(
    status: Document, wanted: Iterable[Condition], *, now: float
) -> list[dict[str, Any]]:
    """The conditions of a status with these in place of those of their types. The transition time
    is that of the last change between true and false.
    """
    found = {str(each.get("type")): dict(each) for each in documents.items(status, "conditions")}
    for each in wanted:
        before, state = found.get(each.type, {}), "True" if each.status else "False"
        since = before.get("lastTransitionTime") if before.get("status") == state else None
        found[each.type] = {
            "type": each.type,
            "status": state,
            "reason": each.reason,
            "message": each.message,
            "lastTransitionTime": since or format_time(now),
        }
    return list(found.values())


def camelize(cause: str) -> str:
    """A cause as the reason of a condition: `out-of-memory` is `OutOfMemory`."""
    words = [word for word in re.split(r"[^A-Za-z0-9]+", cause) if word]
    found = "".join(word[0].upper() + word[1:] for word in words)
    return found if found[:1].isalpha() else f"Cause{found}"


def format_time(moment: float) -> str:
    """Unix seconds as the API server writes times."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_KEPT: Final = (
    "step",
    "targetSteps",
    "samplesSeen",
    "loss",
    "lastCheckpoint",
    "goodput",
    "restartedAt",
)
"""Numbers that stay as they were while no agent answers."""
_ETA_SECONDS = 10
_LONGEST_MESSAGE = 1024
_MOST_NODES = 64
"""Nodes that `avoidedNodes` and `nodeFaults` name at most."""
_ENDS: Final = ("Complete", "Completed", "Succeeded", "Failed")


class Stage(Enum):
    """What the controller is doing with a job."""

    STEADY = "Steady"
    CREATING = "Creating"
    RESTARTING = "Restarting"
    RESIZING = "Resizing"


@dataclass(frozen=True)
class Decision:
    """What was decided about a TrainingJob.

    Attributes:
        wanted: the job that it asks for; None if that is not valid.
        placement: how it is placed; None if it is not.
        stage: what the controller is doing with it.
        outdated: differences that need new pods.
        restarted_at: the `restartedAt` that has been acted on.
        refused: why it is not accepted; None if it is.
        digests: of what its objects are made from.
    """

    wanted: TrainingJob | None = None
    placement: Placement | None = None
    stage: Stage = Stage.STEADY
    outdated: Sequence[str] = ()
    restarted_at: str | None = None
    refused: KdistError | None = None
    digests: Sequence[str] = ()


def is_terminal(status: Document) -> bool:
    """Whether a TrainingJob's status says that the job has ended."""
    return any(is_true(status, kind) for kind in ("Complete", "Failed"))


def ended_at(observed: Observed) -> float | None:
    """When the job ended, in unix seconds: by its workload, else by its status."""
    status = documents.mapping(observed.workload, "status")
    for found in (status, observed.resource.status):
        for each in documents.items(found, "conditions"):
            if each.get("type") in _ENDS and each.get("status") == "True":
                return documents.moment(each, "lastTransitionTime")
    return None


def report(observed: Observed, decision: Decision, *, actions: Sequence[Action]) -> Changes:
    """The status that follows from what is observed and decided, and the events of what is new.
    Until the actions are done, the spec's generation does not count as observed.
    """
    before = observed.resource.status
    after = _build(observed, decision, settled=not actions)
    after = {name: value for name, value in after.items() if value is not None}
    notices = tuple(_list_notices(before, after, decision))
    return Changes(
        actions=tuple(actions), status=None if after == before else after, notices=notices
    )


def _build(observed: Observed, decision: Decision, *, settled: bool) -> dict[str, Any]:
    before = observed.resource.status
    found: dict[str, Any] = dict(before)
    generation = documents.integer(before, "observedGeneration")
    found["observedGeneration"] = observed.resource.generation if settled else generation
    if decision.placement is not None:
        found |= {
            "backend": decision.placement.backend,
            "rendezvous": decision.placement.rendezvous,
            "runId": decision.placement.run_id,
            "appliedDigests": list(decision.digests) or None,
        }
    wanted: list[Condition] = [_accepted(decision)]
    if decision.refused is None or observed.config_map is not None:
        # a job that had ended and has lost its workload since, by its TTL, stays as it was
        is_gone = observed.workload is None and decision.stage is Stage.STEADY
        if not (is_gone and is_terminal(before)):
            phase, reason, cause = _explain(observed, decision)
            found |= _numbers(observed, decision, phase, cause)
            wanted += _phase_conditions(observed, phase, reason, cause)
        found |= _avoided(observed)
        if nodes := [each.node for each in observed.status.avoided]:
            wanted.append(Condition("NodesAvoided", True, "Avoided", _clip(", ".join(nodes))))
        elif find_condition(before, "NodesAvoided"):
            wanted.append(Condition("NodesAvoided", False, "NoneAvoided", ""))
        if decision.refused is None:
            wanted.append(_outdated(decision))
    else:
        found |= {"phase": Phase.PENDING.value, "message": wanted[0].message}
    merged = merge_conditions(before, wanted, now=observed.now)
    generic = _kstatus_conditions({**found, "conditions": merged}, decision)
    found["conditions"] = merge_conditions({"conditions": merged}, generic, now=observed.now)
    return found


def _kstatus_conditions(status: Document, decision: Decision) -> Iterator[Condition]:
    """The conditions by which kstatus, and so Flux, judges objects; present once they were true."""
    busy = decision.refused is None and decision.stage is not Stage.STEADY
    stalled = {"reason": "NotStalled", "message": ""}
    for kind, state in (("Accepted", "False"), ("Failed", "True")):
        if (found := find_condition(status, kind)).get("status") == state:
            stalled = dict(found)
    stuck = stalled["reason"] != "NotStalled"
    for each in (
        Condition("Reconciling", busy, decision.stage.value if busy else "Reconciled", ""),
        Condition("Stalled", stuck, stalled["reason"], stalled["message"]),
    ):
        if each.status or find_condition(status, each.type):
            yield each


def _accepted(decision: Decision) -> Condition:
    if decision.refused is None:
        warnings = [] if decision.wanted is None else warn_of_size(decision.wanted)
        return Condition("Accepted", True, "Valid", _clip("; ".join(warnings)))
    error = decision.refused
    if isinstance(error, InvalidJobError):
        words = "\n".join(problem.sentence for problem in error.problems) or error.message
        return Condition("Accepted", False, "Invalid", _clip(words))
    words = f"{error.message}; {error.hint}" if error.hint else error.message
    reason = "Foreign" if isinstance(error, ForeignError) else "Impossible"
    return Condition("Accepted", False, reason, _clip(words))


def _outdated(decision: Decision) -> Condition:
    if not decision.outdated:
        return Condition("Outdated", False, "UpToDate", "")
    words = f"{describe_differences(decision.outdated)}: takes effect once spec.restartedAt changes"
    return Condition("Outdated", True, "NeedsRestart", _clip(words))


def _explain(observed: Observed, decision: Decision) -> tuple[Phase, str, Diagnosis]:
    """What the job is doing, the reason, and what to do about it."""
    if decision.stage is Stage.RESTARTING:
        words = "its pods save and end, then all ranks start again"
        return Phase.RECOVERING, "Restarting", Diagnosis("start-requested", words, "waiting")
    if observed.trouble:
        return Phase.PENDING, "NotApplied", Diagnosis("warning", observed.trouble, "blocked")
    if decision.stage is Stage.CREATING:
        words = "its objects are being made"
        return Phase.PENDING, "Creating", Diagnosis("starting", words, "waiting")
    status, found = observed.explained.status, observed.diagnosis
    # a diagnosis was made a while ago, when the job did not progress
    if found is None or observed.status.phase.terminal:
        found = diagnose(observed.explained)
    waits = [each for each in observed.decisions if not each.recover]
    if waits and found.cause == "node-lost":
        words = f"{found.sentence}; {waits[0].pod} is not given up yet: {waits[0].message}"
        found = dataclasses.replace(found, sentence=words)
    return status.phase, camelize(status.reason or status.phase.value), found


def _numbers(
    observed: Observed, decision: Decision, phase: Phase, cause: Diagnosis
) -> dict[str, Any]:
    status, job = observed.status, decision.wanted
    step, target, saved = status.step, status.target_steps, status.last_checkpoint_step
    checkpoint: dict[str, Any] = {"step": saved}
    if status.last_checkpoint_time is not None:
        checkpoint["time"] = format_time(status.last_checkpoint_time)
    samples = None
    if step is not None and job is not None and job.spec.train is not None:
        samples = step * job.spec.train.global_batch
    found = {
        "phase": phase.value,
        "message": _clip(cause.sentence),
        "nodes": str(status.nodes),
        "replicas": status.nodes.ready,
        "selector": job_selector(observed.resource.key.name),
        "worldSize": status.world_size,
        "step": step,
        "targetSteps": target,
        "progress": f"{min(1.0, step / target):.0%}" if step is not None and target else None,
        "samplesSeen": samples,
        "loss": None if status.loss is None else f"{status.loss:.4g}",
        "lastCheckpoint": None if saved is None else checkpoint,
        "restarts": status.restarts,
        "restartedAt": decision.restarted_at,
        "goodput": _goodput(observed),
        "eta": _eta(status, observed.now) if phase is Phase.RUNNING else None,
        "diagnosis": None
        if cause.severity == "fine"
        else _clip("; ".join(part for part in (cause.sentence, cause.fix) if part)),
    }
    return {name: value for name, value in found.items() if value is not None or name not in _KEPT}


def _avoided(observed: Observed) -> dict[str, Any]:
    """The nodes that the job avoids, and how many faults each had when the controller decided so:
    it takes more to decide so again. Of others on which its pods are that is 0: whoever leads next
    knows these nodes by it.
    """
    nodes = observed.status.avoided[:_MOST_NODES]
    counted = {each.node: each.faults for each in nodes if each.faults}
    used = {documents.text(pod, "spec", "nodeName") for pod in observed.pods}
    told = (each.machine for each in observed.status.machine_faults)
    seen = {node: 0 for node in told if node in used}
    found = counted | seen | observed.counted_faults | counted
    counted = dict(islice(found.items(), _MOST_NODES))
    words = [
        _clip(f"{each.node} until {format_time(each.until)}" + (each.reason and f": {each.reason}"))
        for each in nodes
    ]
    return {"avoidedNodes": words or None, "nodeFaults": counted or None}


def _goodput(observed: Observed) -> str | None:
    """The share of the run's time that went into steps, by the agent that answered last."""
    for document in observed.reports.values():
        seconds = documents.mapping(document, "wall_seconds")
        whole = [value for value in seconds.values() if isinstance(value, int | float)]
        if seconds.get("unobserved") or not sum(whole):
            continue
        return f"{float(seconds.get('productive_step') or 0.0) / sum(whole):.0%}"
    return None


def _eta(status: JobStatus, now: float) -> str | None:
    paces = (rank.step_seconds for rank in status.ranks)
    left = seconds_left(status.step, status.target_steps, paces)
    end = None if left is None else math.ceil((now + left) / _ETA_SECONDS) * _ETA_SECONDS
    return None if end is None else format_time(end)


def _phase_conditions(
    observed: Observed, phase: Phase, reason: str, cause: Diagnosis
) -> Iterator[Condition]:
    message = _clip(cause.sentence)
    if observed.held:
        words = "; ".join(each.explain() for each in observed.held)
        yield Condition("VolumeAttached", False, "AttachedElsewhere", _clip(words))
    elif find_condition(observed.resource.status, "VolumeAttached"):
        yield Condition("VolumeAttached", True, "Attached", "")
    if observed.status.queue:
        waits = phase is Phase.QUEUED
        yield Condition(
            "QuotaReserved", not waits, "Waiting" if waits else "Reserved", message if waits else ""
        )
    yield Condition("Running", phase is Phase.RUNNING, reason, message)
    suspended = phase is Phase.SUSPENDED
    yield Condition("Suspended", suspended, "Suspended" if suspended else "NotSuspended", "")
    done = phase is Phase.SUCCEEDED
    yield Condition("Complete", done, "Succeeded" if done else "NotEnded", message if done else "")
    failed = phase in (Phase.FAILED, Phase.STOPPED)
    reason = camelize(cause.cause) if failed else "NotEnded"
    yield Condition("Failed", failed, reason, message if failed else "")


def _list_notices(
    before: Document, after: Mapping[str, Any], decision: Decision
) -> Iterator[Notice]:
    if decision.placement is not None and not documents.text(before, "runId"):
        placement = decision.placement
        yield Notice(
            "Created",
            f"backend {placement.backend}, rendezvous {placement.rendezvous}, "
            f"run {placement.run_id}",
        )
    for words in documents.texts(after, "avoidedNodes"):
        if words not in documents.texts(before, "avoidedNodes"):
            yield Notice("NodeAvoided", words, warning=True)
    for kind in ("Suspended", "Outdated", "Complete", "Failed"):
        if is_true(after, kind) and not is_true(before, kind):
            message = documents.text(find_condition(after, kind), "message") or kind
            yield Notice(kind, message, warning=kind == "Failed")
    refused = find_condition(after, "Accepted")
    if refused.get("status") == "False" and refused != find_condition(before, "Accepted"):
        yield Notice("NotAccepted", documents.text(refused, "message"), warning=True)
    if is_true(before, "Suspended") and not is_true(after, "Suspended"):
        yield Notice("Resumed", "its pods start, and continue from the last checkpoint")
    now, then = (
        documents.text(find_condition(each, "Running"), "reason") for each in (after, before)
    )
    if now == "Restarting" != then:
        yield Notice("Restarting", "its pods save and end, then all ranks start again")
    if now == "NodeLost" != then:
        yield Notice("NodeLost", documents.text(after, "diagnosis"), warning=True)


def _clip(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"

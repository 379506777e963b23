"""State of a TrainingJob resource, read from its document: whether the controller has acted on it,
accepts it, and what it says of a job that has no objects of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kdist.manifest import TRAINING_JOB
from kdist.status import documents
from kdist.status.documents import Document

CONTROLLER_FIX: Final = (
    "an admin of the cluster restores the controller: `helm upgrade` of kdist's chart with "
    "controller.enabled=true, and the namespace in its watchNamespaces; the job then continues"
)
"""What to do where no controller acts on TrainingJobs."""

_API_VERSION, _KIND = TRAINING_JOB


@dataclass(frozen=True)
class ResourceState:
    """State of a TrainingJob resource.

    Attributes:
        generation: counts the changes of its spec.
        observed_generation: the last one that the controller has acted on; 0 for none.
        seen: whether a controller has ever written its status.
        accepted: whether the newest generation can run; None if that is not decided yet.
        refusal: why it cannot.
        outdated: what takes effect with the next restart; empty if nothing waits for one.
        suspended: whether it is to be suspended.
        finished: how the job ended; None if it has not.
        phase: what the controller says that the job is doing.
        message: a sentence about that, or about the end.
        created: unix seconds.
    """

    generation: int = 0
    observed_generation: int = 0
    seen: bool = False
    accepted: bool | None = None
    refusal: str = ""
    outdated: str = ""
    suspended: bool = False
    finished: Literal["succeeded", "failed"] | None = None
    phase: str = ""
    message: str = ""
    created: float | None = None

    @property
    def answered(self) -> bool:
        """Whether the controller has acted on the newest generation."""
        return self.generation <= self.observed_generation

    def explain(self, now: float) -> tuple[str, str, str]:
        """Phase, reason and message of a job that has no workload, at this time."""
        if self.finished is not None:
            return self.finished.capitalize(), "", self.message
        if self.refusal:
            return "Pending", "NotAccepted", self.refusal
        if not self.seen:
            if self.created is None or now - self.created < _SILENT_SECONDS:
                return "Pending", "Created", "its objects are not created yet"
            return "Pending", "NoController", "no controller acts on it: its objects do not exist"
        if self.suspended:
            return "Suspended", "Suspended", "suspended on request"
        return self.phase, "NoWorkload", self.message or "its workload does not exist yet"


_SILENT_SECONDS = 10.0
"""Age at which a resource without a status shows that no controller acts on it."""


def read_resource(document: Document) -> ResourceState:
    """The state of a TrainingJob resource."""
    status = documents.mapping(document, "status")
    accepted = documents.condition(document, "Accepted")
    generation = documents.integer(document, "metadata", "generation") or 0
    observed = documents.integer(status, "observedGeneration") or 0
    decided = documents.text(accepted, "status")
    # of an older generation it says nothing about this one
    current = bool(decided) and observed >= generation
    outdated = documents.condition(document, "Outdated")
    end = next(
        (
            (word, documents.text(found, "message"))
            for kind, word in _ENDS.items()
            if documents.text(found := documents.condition(document, kind), "status") == "True"
        ),
        None,
    )
    return ResourceState(
        generation=generation,
        observed_generation=observed,
        seen=bool(status),
        accepted=decided == "True" if current else None,
        refusal=documents.text(accepted, "message") if current and decided == "False" else "",
        outdated=documents.text(outdated, "message")
        if documents.text(outdated, "status") == "True"
        else "",
        suspended=documents.at(document, "spec", "suspend") is True,
        finished=None if end is None else end[0],
        phase=documents.text(status, "phase"),
        message=documents.text(status, "message") if end is None else end[1],
        created=documents.moment(document, "metadata", "creationTimestamp"),
    )


def read_numbers(document: Document | None) -> dict[str, Any]:
    """The numbers that the controller wrote last, as attributes of a `JobStatus`."""
    status = documents.mapping(document, "status")
    found = {
        "world_size": documents.integer(status, "worldSize"),
        "step": documents.integer(status, "step"),
        "target_steps": documents.integer(status, "targetSteps"),
        "restarts": documents.integer(status, "restarts"),
        "loss": _parse_loss(documents.text(status, "loss")),
        "last_checkpoint_step": documents.integer(status, "lastCheckpoint", "step"),
        "last_checkpoint_time": documents.moment(status, "lastCheckpoint", "time"),
    }
    return {name: value for name, value in found.items() if value is not None}


def knows_numbers(document: Document | None) -> bool:
    """Whether the controller has written how far the training is."""
    return documents.integer(document, "status", "step") is not None


def _parse_loss(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_ENDS: Mapping[str, Literal["succeeded", "failed"]] = {"Complete": "succeeded", "Failed": "failed"}


def find_owning_resource(document: Document | None) -> Mapping[str, Any] | None:
    """The reference to the TrainingJob that an object was created for; None without one."""
    group = _API_VERSION.partition("/")[0]
    return next(
        (
            each
            for each in documents.items(document, "metadata", "ownerReferences")
            if each.get("kind") == _KIND
            and documents.text(each, "apiVersion").partition("/")[0] == group
        ),
        None,
    )

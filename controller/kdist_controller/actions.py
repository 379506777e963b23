"""What `reconcile` decides: actions on objects, a new status, events. Plain values; `executor`
carries them out. Every action may be repeated after an interruption without doing anything twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdist.backends import Placement
from kdist.manifest import ObjectKey
from kdist.spec import TrainingJob


@dataclass(frozen=True)
class ApplyObjects:
    """Apply the job's objects as `job` has them; with `only`, those that it names. `asked` records
    that the job is to be suspended.
    """

    job: TrainingJob
    placement: Placement
    asked: bool = False
    only: frozenset[ObjectKey] | None = None


@dataclass(frozen=True)
class RecordJob:
    """Apply the job's own ConfigMap, with the limits on the number of nodes of another job, which
    the agents read, and with the `job.json` that it goes on recording; empty for that of `job`.
    `asked` records that the job is to be suspended.
    """

    job: TrainingJob
    placement: Placement
    asked: bool
    limits: TrainingJob
    text: str = ""


@dataclass(frozen=True)
class ResizeWorkload:
    """Apply what follows from the number of nodes to a workload that exists, and nothing else."""

    job: TrainingJob
    placement: Placement


@dataclass(frozen=True)
class AnnounceLimits:
    """Have the kubelets of these pods show the agents the new limits now."""

    pods: tuple[str, ...]
    least: int
    most: int


@dataclass(frozen=True)
class SuspendWorkload:
    """Let the workload, or Kueue, end the job's pods, or make them again."""

    suspended: bool
    nodes: int
    queued: bool


@dataclass(frozen=True)
class RecordOutcome:
    """Scale a workload that cannot end by itself to zero pods, and keep its exit record."""

    record: str


@dataclass(frozen=True)
class DeleteObject:
    """Delete one object, as it was observed."""

    key: ObjectKey
    foreground: bool = False


@dataclass(frozen=True)
class ForgetEnd:
    """Clear the result of the finished run from the rendezvous."""


Action = (
    ApplyObjects
    | RecordJob
    | ResizeWorkload
    | AnnounceLimits
    | SuspendWorkload
    | RecordOutcome
    | DeleteObject
    | ForgetEnd
)


@dataclass(frozen=True)
class Notice:
    """A Kubernetes event about the TrainingJob.

    Attributes:
        reason: in CamelCase.
        message: a sentence.
        warning: whether it is a warning.
        occasion: what distinguishes it from others with the same reason; empty for the version of
            the TrainingJob.
    """

    reason: str
    message: str
    warning: bool = False
    occasion: str = ""


@dataclass(frozen=True)
class Changes:
    """What has to be done for one TrainingJob, in this order: events, status, actions.

    Attributes:
        actions: in their order; each needs those before it.
        status: the whole status; None if it stays as it is.
        notices: the events.
        requeue_after: seconds after which to reconcile again, though nothing was heard; None if
            there is no need.
        poll_now: poll all agents at once, not only one of them every now and then.
    """

    actions: tuple[Action, ...] = ()
    status: dict[str, Any] | None = None
    notices: tuple[Notice, ...] = ()
    requeue_after: float | None = None
    poll_now: bool = False

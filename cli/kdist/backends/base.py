"""What every workload kind answers: its template and values, what it cannot express, how it is steered and read. Pure.

A `Placement` is what a job becomes besides its file: decided once per run by `kdist apply`, kept in the job's ConfigMap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from kdist.spec import Exit, TrainingJob

PERMANENT_CODES: Final = tuple(sorted([1, 2, 126, 127, *(code.value for code in Exit if code and not code.retryable)]))
"""Exit codes that another try cannot help: ours, an uncaught exception, wrong usage, and a command that cannot be run."""

_BACKSTOP: Final = 5


@dataclass(frozen=True)
class Placement:
    """How a job is put on a cluster. `code` holds the files of `spec.code` by their path with `/`, None where there is none.

    `suspended` renders the workload so that it does not start; a job with a queue is first sent so, as Kueue wants it.
    """

    backend: str
    rendezvous: Literal["kubernetes", "c10d"]
    run_id: str
    suspended: bool = False
    take_over: bool = False
    code: Mapping[str, bytes] | None = None


@dataclass(frozen=True)
class WorkloadState:
    """What the workload's own status says, in words independent of its kind; counts are pods where the kind counts pods."""

    active: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    suspended: bool = False
    finished: Literal["succeeded", "failed"] | None = None
    reason: str = ""
    message: str = ""


class Backend(ABC):
    """A workload kind. `container` is the name that the kind wants for the pod's training container."""

    name: ClassVar[str]
    api_version: ClassVar[str]
    kind: ClassVar[str]
    template: ClassVar[str]
    container: ClassVar[str] = "trainer"
    restart_policy: ClassVar[Literal["Never", "Always", ""]] = "Never"
    parks: ClassVar[bool] = False
    """Whether an agent that has ended stays until it is told to go, because the kind would start its pod again."""
    pods_have_ready_probe: ClassVar[bool] = False

    @abstractmethod
    def first_host(self, name: str) -> str:
        """DNS name of node 0's pod, within the job's namespace."""

    def values(self, job: TrainingJob, placement: Placement) -> dict[str, Any]:  # noqa: ARG002 - the kinds' signature
        """What the template of the kind needs besides the job."""
        return {}

    def warnings(self, job: TrainingJob, rendezvous: str = "") -> list[str]:
        """What this kind cannot express of the job, each with its reason and an alternative."""
        return [*self._limits(job), *_shared_limits(job, rendezvous or job.spec.rendezvous)]

    def _limits(self, job: TrainingJob) -> Iterable[str]:  # noqa: ARG002 - the kinds' signature
        return ()

    def pod_selector(self, name: str) -> str:
        """Label selector of the job's pods."""
        return f"kdist.dev/job={name}"

    def scale_patch(self, nodes: int) -> dict[str, Any] | None:  # noqa: ARG002 - the kinds' signature
        """Merge patch that gives a running workload so many pods; None where the kind cannot be scaled."""
        return None

    @abstractmethod
    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:
        """Merge patch that suspends the workload, or resumes it with `nodes` pods."""

    @abstractmethod
    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """What the workload's object says about itself."""


def backstop(job: TrainingJob) -> int:
    """Retries of one node's pod before the kind itself gives up: more than the job's own budget, which decides."""
    return _BACKSTOP * (job.spec.max_restarts + 1)


def is_elastic(job: TrainingJob) -> bool:
    """Whether the job goes on with fewer nodes than it may have."""
    return job.spec.nodes.min < job.spec.nodes.max


def find_condition(workload: Mapping[str, Any], *types: str) -> Mapping[str, Any]:
    """The first of these conditions that is true; empty if none is."""
    conditions: Sequence[Mapping[str, Any]] = (workload.get("status") or {}).get("conditions") or ()
    for wanted in types:
        for condition in conditions:
            if condition.get("type") == wanted and condition.get("status") == "True":
                return condition
    return {}


def read_end(workload: Mapping[str, Any], succeeded: str, failed: str) -> WorkloadState:
    """How the workload ended, if it did, from the two conditions that say so; the counts are left to the kind."""
    done, broken = find_condition(workload, succeeded), find_condition(workload, failed)
    condition = done or broken
    return WorkloadState(
        finished="succeeded" if done else "failed" if broken else None,
        reason=str(condition.get("reason", "")),
        message=str(condition.get("message", "")),
    )


def _shared_limits(job: TrainingJob, rendezvous: str) -> Iterator[str]:
    """What no kind can give this job."""
    checkpoints = job.spec.checkpoints
    if checkpoints is None or checkpoints.path is not None:
        why = "there are no checkpoints" if checkpoints is None else "checkpoints.path is a folder of your own machine"
        yield f"{why}: a lost pod loses all that was learnt; give checkpoints {{claim: …}} or {{size: 10Gi}}"
    elif checkpoints.access_mode in ("ReadWriteOnce", "ReadWriteOncePod") and job.spec.nodes.max > 1:
        yield (
            f"checkpoints.accessMode {checkpoints.access_mode} lets only one node or pod mount the claim, so not all "
            f"{job.spec.nodes.max} pods may start; use ReadWriteMany"
        )
    if rendezvous == "c10d":
        yield (
            "with rendezvous c10d, node 0's pod holds the state of the rendezvous: losing it restarts all of the job's pods, "
            "which resume from the last checkpoint; kubernetes has no such pod, and needs leave to create a Role"
        )

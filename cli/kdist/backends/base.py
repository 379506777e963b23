"""What every workload kind answers: its template and values, what it cannot express, how it is
steered and read. Pure.

A `Placement` is what a job becomes besides its file: decided once per run by `kdist apply`, kept in
the job's ConfigMap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from kdist.status import WorkloadState

# what only looks at jobs has no use for the fields of job.yaml, which take longer to import than to
# ask
if TYPE_CHECKING:
    from kdist.spec import TrainingJob

_BACKSTOP: Final = 5


@dataclass(frozen=True)
class Placement:
    """How a job is put on a cluster. `code` holds the files of `spec.code` by their path with `/`,
    None where there is none.

    `suspended` renders the workload so that it does not start; a job with a queue is first sent so,
    as Kueue wants it.
    """

    backend: str
    rendezvous: Literal["kubernetes", "c10d"]
    run_id: str
    suspended: bool = False
    take_over: bool = False
    code: Mapping[str, bytes] | None = None


class Backend(ABC):
    """A workload kind.

    `container` is the name that the kind wants for the training's container, `parts` are the
    templates that its own one is put together from, innermost first. `parks` says that an agent
    which has ended stays until it is told to go, because the kind would start its pod again.
    `scalable` is empty where the number of nodes can be changed while the job runs, else the reason
    why not. `keeps_template` says that the template of a workload at work stays as it was, because
    its controller would start single pods from another one, or has a copy of it; a restart makes it
    anew. `uid_label` is the pods' label with the workload's uid, empty where the kind gives none.
    """

    name: ClassVar[str]
    api_version: ClassVar[str]
    kind: ClassVar[str]
    template: ClassVar[str]
    container: ClassVar[str] = "trainer"
    parts: ClassVar[tuple[str, ...]] = ()
    restart_policy: ClassVar[Literal["Never", "Always", ""]] = "Never"
    parks: ClassVar[bool] = False
    scalable: ClassVar[str] = ""
    keeps_template: ClassVar[bool] = False
    uid_label: ClassVar[str] = ""

    @abstractmethod
    def first_host(self, name: str) -> str:
        """DNS name of node 0's pod, within the job's namespace."""

    def values(self, job: TrainingJob, placement: Placement) -> dict[str, Any]:  # noqa: ARG002 - the kinds' signature
        """What the template of the kind needs besides the job."""
        return {}

    def warnings(self, job: TrainingJob, rendezvous: str = "") -> list[str]:
        """What a cluster, and this kind, cannot give the job; each with its reason and an
        alternative.
        """
        return [*self._limits(job), *self._shared_limits(job, rendezvous or job.spec.rendezvous)]

    def _limits(self, job: TrainingJob) -> Iterator[str]:
        """What this kind alone cannot express."""
        if job.spec.queue and is_elastic(job):
            yield (
                f"Kueue admits a {self.kind} only with quota for all {job.spec.nodes.max} "
                "nodes, and it cannot be scaled then; "
                "backend: job can be scaled within its queue"
            )

    def _shared_limits(self, job: TrainingJob, rendezvous: str) -> Iterator[str]:
        least, pod = job.spec.nodes.min, job.spec.pod_template.get("spec")
        if (
            least > 1
            and not job.spec.queue
            and not (isinstance(pod, dict) and pod.get("schedulerName"))
        ):
            yield (
                f"nothing waits for room for all {least} pods: on a full cluster two jobs "
                "may each hold a part and wait for the "
                "other; spec.queue (Kueue) admits a job whole"
            )
        yield from _storage_limits(job)
        for name in _sidecars(job):
            yield (
                f"the container {name} of podTemplate keeps its pod from ending; put it "
                "into initContainers with restartPolicy "
                "Always, and it ends with the training"
            )
        if rendezvous == "c10d":
            yield (
                "with rendezvous c10d, node 0's pod holds the state of the rendezvous: "
                "losing it restarts all pods of the job, "
                "which resume from the last checkpoint; kubernetes has no such pod, and "
                "needs leave to create a Role"
            )

    def pod_selector(self, name: str) -> str:
        """Label selector of the job's pods."""
        return f"kdist.dev/job={name}"

    def scale_patch(self, nodes: int) -> dict[str, Any] | None:  # noqa: ARG002 - the kinds' signature
        """Merge patch that gives a running workload so many pods; None where the kind cannot be
        scaled.
        """
        return None

    def keep(self, rendered: dict[str, Any], workload: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - the kinds' signature
        """`rendered` for a workload that is there, with what other numbers of nodes would change
        and may not.
        """
        return rendered

    @abstractmethod
    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:
        """Merge patch that suspends the workload, or resumes it with `nodes` pods."""

    @abstractmethod
    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """What the workload's object says about itself."""


def list_permanent_codes() -> list[int]:
    """Exit codes that another try cannot help: ours, an uncaught exception, wrong usage, and a
    command that cannot be run.
    """
    from kdist.spec import Exit

    return sorted([1, 2, 126, 127, *(code.value for code in Exit if code and not code.retryable)])


def backstop(job: TrainingJob) -> int:
    """Retries of one node's pod before the kind itself gives up: more than the job's own budget,
    which decides.
    """
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


def _sidecars(job: TrainingJob) -> list[str]:
    spec = job.spec.pod_template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    names = (
        [str(each.get("name")) for each in containers if isinstance(each, dict)]
        if isinstance(containers, list)
        else []
    )
    return [name for name in names if name != "trainer"]


def _storage_limits(job: TrainingJob) -> Iterator[str]:
    checkpoints, nodes = job.spec.checkpoints, job.spec.nodes.max
    if checkpoints is None or checkpoints.path is not None:
        why = (
            "there are no checkpoints"
            if checkpoints is None
            else "checkpoints.path is a folder of your own machine"
        )
        yield (
            f"{why}: a lost pod loses all that was learnt; give checkpoints {{claim: NAME}} "
            f"or {{size: 10Gi}}"
        )
    elif nodes > 1 and checkpoints.access_mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        holder = "node" if checkpoints.access_mode == "ReadWriteOnce" else "pod"
        yield (
            f"checkpoints.accessMode {checkpoints.access_mode} lets a single {holder} "
            f"mount the claim, so the job's {nodes} pods "
            "may not all start; ReadWriteMany lets them"
        )


def is_made_for(pod: Mapping[str, Any], name: str) -> bool:
    """Whether a controller made the pod for the job's workload, of whatever kind; its labels say
    only what they say.
    """
    made_by = {
        ("Job", name),
        ("Job", f"{name}-node-0"),
        ("StatefulSet", name),
        ("PyTorchJob", name),
    }
    owners = (pod.get("metadata") or {}).get("ownerReferences") or []
    return any((each.get("kind"), each.get("name")) in made_by for each in owners)


def read_end(workload: Mapping[str, Any], succeeded: str, failed: str) -> WorkloadState:
    """How the workload ended, if it did, from the two conditions that say so; the counts are left
    to the kind.
    """
    done, broken = find_condition(workload, succeeded), find_condition(workload, failed)
    condition = done or broken
    return WorkloadState(
        finished="succeeded" if done else "failed" if broken else None,
        reason=str(condition.get("reason", "")),
        message=str(condition.get("message", "")),
    )

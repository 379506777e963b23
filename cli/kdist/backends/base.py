"""The interface of a workload kind: its template and values, its limitations, how it is suspended
and how its status is read. Pure.

A `Placement` holds what `kdist apply` decides once per run in addition to the job file; it is
stored in the job's ConfigMap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from kdist.manifest import job_selector
from kdist.status import WorkloadState, documents

# commands that only read jobs do not need the fields of job.yaml, which are slow to import
if TYPE_CHECKING:
    from kdist.spec import TrainingJob

_RETRIES_PER_RESTART: Final = 5
_MEASURED_NODES: Final = 64


@dataclass(frozen=True)
class Placement:
    """How a job is placed on a cluster.

    Attributes:
        backend: name of the workload kind.
        rendezvous: the rendezvous backend.
        run_id: id of the run.
        suspended: render the workload so that it does not start. Kueue requires this for the first
            apply of a job with a queue.
        take_over: take over checkpoints locked by another run.
        code: files of `spec.code` by their path with `/`; None if there is none.
    """

    backend: str
    rendezvous: Literal["kubernetes", "c10d"]
    run_id: str
    suspended: bool = False
    take_over: bool = False
    code: Mapping[str, bytes] | None = None


class Backend:
    """A workload kind.

    Attributes:
        name: name in job.yaml.
        api_version: of the workload.
        kind: of the workload.
        template: name of its template.
        host: DNS name of node 0's pod of job `name`, within the job's namespace.
        success: type of the condition of a workload that has succeeded.
        container: name that the kind requires for the training's container.
        parts: templates that its own one includes, innermost first.
        restart_policy: of the pods; empty if the controller sets it.
        deletes_itself: the kind's controller deletes a workload that has ended after its TTL.
        keeps_alive: an agent stays alive after its end, because the kind would start its pod again.
        scalable: empty if the number of nodes can be changed while the job runs, else the reason
            why not.
        keeps_template: the pod template of a running workload never changes, because the controller
            would start single pods from the new one, or has a copy of it; a restart replaces it.
        sizes: fields of the workload outside of its pods that commands change, or controllers set.
        refusals: what the API server says of a change that it does not allow.
        uid_label: the pods' label with the workload's uid; empty if the kind sets none.
        reuses_pod_names: a pod that replaces another one has its name, so the other one must be
            gone.
    """

    name: ClassVar[str]
    api_version: ClassVar[str]
    kind: ClassVar[str]
    template: ClassVar[str]
    host: ClassVar[str] = "{name}-0.{name}"  # within the job's headless Service
    success: ClassVar[str] = "Complete"
    container: ClassVar[str] = "trainer"
    parts: ClassVar[tuple[str, ...]] = ()
    restart_policy: ClassVar[Literal["Never", "Always", ""]] = "Never"
    deletes_itself: ClassVar[bool] = False
    keeps_alive: ClassVar[bool] = False
    scalable: ClassVar[str] = ""
    keeps_template: ClassVar[bool] = False
    sizes: ClassVar[tuple[str, ...]]
    refusals: ClassVar[tuple[str, ...]] = ("immutable", "cannot be changed", "cannot be updated")
    uid_label: ClassVar[str] = ""
    reuses_pod_names: ClassVar[bool] = False

    def values(self, job: TrainingJob, placement: Placement) -> dict[str, Any]:  # noqa: ARG002 - the kinds' signature
        """Values for the kind's template in addition to the job."""
        return {}

    def warnings(self, job: TrainingJob, rendezvous: str = "") -> list[str]:
        """Limitations of this kind and of clusters for the job, each with an alternative."""
        return [*self._limits(job), *self._shared_limits(job, rendezvous or job.spec.rendezvous)]

    def _limits(self, job: TrainingJob) -> Iterator[str]:
        """The limitations of this kind."""
        if job.spec.queue and is_elastic(job):
            yield (
                f"Kueue admits a {self.kind} only with quota for all {job.spec.nodes.max} "
                "nodes, and then it cannot be scaled; "
                "backend: job can be scaled within its queue"
            )

    def _shared_limits(self, job: TrainingJob, rendezvous: str) -> Iterator[str]:
        from kdist.spec import list_warnings  # the fields of job.yaml are slow to import

        least, pod = job.spec.nodes.min, job.spec.pod_template.get("spec")
        if (
            least > 1
            and not job.spec.queue
            and not (isinstance(pod, dict) and pod.get("schedulerName"))
        ):
            yield (
                f"pods are scheduled one by one, not all {least} together: on a full cluster two "
                "jobs may each hold a part of the nodes and wait for each other; spec.queue "
                "(Kueue) admits a job as a whole"
            )
        yield from warn_of_size(job)
        yield from _storage_limits(job)
        yield from list_warnings(job.spec)
        for name in _sidecars(job):
            yield (
                f"the container {name} of podTemplate keeps its pod from ending; move it to "
                "initContainers with restartPolicy Always, and it ends with the training"
            )
        if rendezvous == "c10d":
            yield (
                "with rendezvous c10d, node 0's pod holds the state of the rendezvous: "
                "losing it restarts all pods of the job, "
                "which resume from the last checkpoint; rendezvous kubernetes has no such pod, but "
                "needs the right to create a Role"
            )

    def pod_selector(self, name: str) -> str:
        """Label selector of the job's pods."""
        return job_selector(name)

    def pod_owners(self, name: str) -> tuple[tuple[str, str, str], ...]:  # noqa: ARG002 - the kinds' signature
        """(API version, kind, name) of the objects between the workload and its pods: the workload
        creates the first of them, each of them the next, and the last one the pods.
        """
        return ()

    def keep(self, rendered: dict[str, Any], workload: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - the kinds' signature
        """`rendered` for an existing workload, with the fields restored that must not change with
        the number of nodes.
        """
        return rendered

    def suspend_patch(self, suspended: bool, *, nodes: int = 1) -> dict[str, Any]:  # noqa: ARG002 - the kinds' signature
        """Merge patch that suspends the workload, or resumes it with `nodes` pods. Those of a
        suspended Job end by SIGTERM, which saves.
        """
        return {"spec": {"suspend": suspended}}

    def read(self, workload: Mapping[str, Any]) -> WorkloadState:
        """The state of a workload, from its object. Without counts where the kind counts Jobs, not
        pods.
        """
        ends = [documents.condition(workload, each) for each in (self.success, "Failed")]
        done, broken = (each if each.get("status") == "True" else {} for each in ends)
        condition = done or broken
        return WorkloadState(
            suspended=bool((workload.get("spec") or {}).get("suspend")),
            finished="succeeded" if done else "failed" if broken else None,
            reason=documents.text(condition, "reason"),
            message=documents.text(condition, "message"),
        )


def warn_of_size(job: TrainingJob) -> list[str]:
    """The warning about more nodes than have ever formed a group together."""
    count = job.spec.nodes.max + job.spec.nodes.standby
    if count <= _MEASURED_NODES:
        return []
    return [
        f"spec.nodes: {count:,} nodes: how long more than {_MEASURED_NODES} take to form a group "
        "has not been measured, and with rendezvous kubernetes all of them write one ConfigMap; "
        "fewer nodes with more procsPerNode form a group sooner"
    ]


def list_permanent_codes() -> list[int]:
    """Exit codes after which a retry cannot succeed: the trainer's own permanent ones, an uncaught
    exception, wrong usage, and a command that cannot be run.
    """
    from kdist.spec import Exit

    return sorted([1, 2, 126, 127, *(code.value for code in Exit if code and not code.retryable)])


def backoff_limit(job: TrainingJob) -> int:
    """Retries of one node's pod before the workload itself fails: more than the job's own restart
    limit, which the agents enforce.
    """
    return _RETRIES_PER_RESTART * (job.restart_limit + 1)


def is_elastic(job: TrainingJob) -> bool:
    """Whether the job can run with fewer nodes than its maximum."""
    return job.spec.nodes.min < job.spec.nodes.max


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
    if checkpoints is None or not checkpoints.in_cluster:
        why = (
            "there are no checkpoints"
            if checkpoints is None
            else "checkpoints.path is a folder of your own machine"
        )
        ways = "checkpoints {claim: NAME}, {size: 10Gi} or {url: s3://BUCKET/PREFIX}"
        if job.spec.script is None:
            yield f"{why}: a lost pod loses all training progress; set {ways}"
        elif job.spec.max_restarts is None:
            yield (
                f"{why}: a failure or a lost pod ends the job, because its script cannot continue "
                f"and its files are its own; a kdist_trainer.Checkpointer with {ways} "
                "continues, maxRestarts starts it from its beginning"
            )
        elif job.spec.max_restarts:
            yield f"{why}: after a failure or a lost pod the script starts from its beginning"
    elif nodes > 1 and checkpoints.access_mode in ("ReadWriteOnce", "ReadWriteOncePod"):
        holder = "node" if checkpoints.access_mode == "ReadWriteOnce" else "pod"
        yield (
            f"checkpoints.accessMode {checkpoints.access_mode} lets only one {holder} "
            f"mount the claim, so the job's {nodes} pods "
            "may not all start; use ReadWriteMany"
        )

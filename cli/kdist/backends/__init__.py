"""The workload kinds that a job can become on a cluster, by the names that job.yaml uses.

One module for each kind, with its template in `manifests/`, and its entry in the table here;
CONTRIBUTING.md lists what else a new kind needs. Read `base` first: it defines what a kind
states about itself, such as how its status is read and what it cannot do. Nothing here talks to a
cluster: `deploy` and `job.cluster` do, and `status` has what the kinds share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from kdist.backends.base import (
    Backend,
    Placement,
    backoff_limit,
    is_elastic,
    list_permanent_codes,
    warn_of_size,
)
from kdist.backends.job import IndexedJob
from kdist.backends.jobset import JobSet
from kdist.backends.pytorchjob import PyTorchJob
from kdist.backends.statefulset import StatefulSet
from kdist.backends.trainjob import TrainJob
from kdist.errors import KdistError
from kdist.manifest import CLAIM, DEPENDENT_KINDS, KEY_KIND, RUNTIME, group_kind
from kdist.status import WorkloadState

if TYPE_CHECKING:
    from kdist.spec import TrainingJob

_BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (IndexedJob(), StatefulSet(), PyTorchJob(), JobSet(), TrainJob())
}
NAMES: Final = tuple(_BACKENDS)
_BY_KIND: Final = {group_kind(each.api_version, each.kind): each for each in _BACKENDS.values()}


def get(name: str) -> Backend:
    """The backend with this name in job.yaml. Raises `KdistError` for an unknown name."""
    if name not in _BACKENDS:
        raise KdistError(f"there is no backend `{name}`", hint=f"one of {', '.join(NAMES)}")
    return _BACKENDS[name]


def require(backend: Backend, kinds: Collection[tuple[str, str]]) -> None:
    """Raise `KdistError` if a cluster that knows these (apiVersion, kind) lacks the backend's."""
    if (backend.api_version, backend.kind) not in kinds:
        raise KdistError(
            f"backend {backend.name}: this cluster has no {backend.kind} ({backend.api_version})",
            hint="install its operator, or let `backend: auto` choose what the cluster has",
            next_command="kdist doctor",
        )


def refuse_kind(job: str, decided: str, asked: str, *, hint: str, command: str = "") -> KdistError:
    """The error for a job that asks, in these words, for another kind than was decided for it."""
    fixed = "the kind of an existing job cannot be changed"
    message = f"{job} runs as backend {decided}, but {asked}: {fixed}"
    return KdistError(message, hint=hint, next_command=command)


def find(api_version: object, kind: object) -> Backend | None:
    """The backend whose workloads are of this kind, in any version; None if there is none. A kind
    of the same name in another group is somebody else's.
    """
    return _BY_KIND.get(group_kind(api_version, kind))


def is_made_for(pod: Mapping[str, Any], name: str) -> bool:
    """Whether a controller created the pod for the job's workload, whatever its kind. Its labels
    are no proof.
    """
    return any(
        each.get("controller")
        and (*group_kind(each.get("apiVersion"), each.get("kind")), each.get("name"))
        in _list_makers(name)
        for each in (pod.get("metadata") or {}).get("ownerReferences") or []
    )


@lru_cache(maxsize=1024)  # the controller asks for each pod, again and again
def _list_makers(name: str) -> frozenset[tuple[str, str, str]]:
    """(API group, kind, name) of what may have created the pods of the job, by each backend."""
    makers = (
        ((each.api_version, each.kind, name), *each.pod_owners(name))[-1]
        for each in _BACKENDS.values()
    )
    return frozenset((*group_kind(version, kind), maker) for version, kind, maker in makers)


def workload_kinds() -> list[tuple[str, str]]:
    """(API version, kind) of every workload kind."""
    return [(each.api_version, each.kind) for each in _BACKENDS.values()]


def rendered_kinds(name: str) -> list[tuple[str, str]]:
    """(API version, kind) of everything that a job of this backend is rendered to; of all backends
    without a name.
    """
    if not name:
        return [*DEPENDENT_KINDS, *workload_kinds()]
    own = get(name)
    runtime = own.name == TrainJob.name
    kinds = [each for each in DEPENDENT_KINDS if runtime or each[1] != RUNTIME]
    return [*kinds, (own.api_version, own.kind)]


def choose(kinds: Collection[tuple[str, str]], job: TrainingJob | None = None) -> str:
    """What `backend: auto` becomes on a cluster that knows these (apiVersion, kind).

    JobSet where there is one, else the Indexed Job. An elastic job is always an Indexed Job: the
    only kind that Kubernetes and Kueue can scale while it runs. So is one with nodes that stand by:
    the other kinds start all pods again when one is lost, or have operators that count the pods.
    """
    if job is not None and (is_elastic(job) or job.spec.nodes.standby):
        return IndexedJob.name
    return JobSet.name if (JobSet.api_version, JobSet.kind) in kinds else IndexedJob.name


def choose_rendezvous(
    job: TrainingJob, *, may_create_role: bool = True
) -> Literal["kubernetes", "c10d"]:
    """What `rendezvous` becomes on a cluster. Raises `KdistError` for `file`, which is a folder of
    one machine.
    """
    if job.spec.rendezvous == "file":
        raise KdistError(
            "rendezvous: file is for `kdist run`; pods share no folder",
            hint="leave it out, or use kubernetes or c10d",
        )
    if job.spec.rendezvous == "auto":
        return "kubernetes" if may_create_role else "c10d"
    return job.spec.rendezvous

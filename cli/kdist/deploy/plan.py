"""The plan of a job for a cluster: its workload kind, rendezvous and run, which are chosen once and
stored in the job's ConfigMap.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kdist import backends, rbac, render
from kdist.backends import Placement
from kdist.deploy.code import place_code
from kdist.deploy.live_workload import find_live_workload, is_new, select_workload
from kdist.deploy.package_lock import lock_packages
from kdist.errors import KdistError
from kdist.job_file.folder import CodeFolder
from kdist.manifest import JobOwner, Manifest
from kdist.rbac import Right
from kdist.spec import RUN, TrainingJob
from kdist.status import (
    ASKED,
    BACKEND,
    NAMESPACE_VARIABLE,
    RENDEZVOUS,
    RUN_ID,
    WorkloadState,
    documents,
    find_owning_resource,
)
from kdist_trainer.formats.untrusted_text import parse_json

if TYPE_CHECKING:
    from kdist.cluster import Applied, Cluster, JobObjects


@dataclass(frozen=True)
class Plan:
    """A job as it would be applied: its objects, and warnings for the user.

    `config_map` is the job's ConfigMap on the cluster, None for a new job, or for one whose
    ConfigMap is gone: its workload is there then. `folder`: what is sent of the code folder of this
    machine. `workload`: as it is on the cluster, if it is; that of a job that exists may be gone,
    for instance by its TTL. `deferred`: what says how the pods will be after a restart, where the
    workload keeps those it has. `finished`: how the workload has ended. `restarts`: the job is
    restarted once it is applied.
    """

    job: TrainingJob
    placement: Placement
    manifests: list[Manifest]
    warnings: list[str]
    config_map: dict[str, Any] | None = None
    folder: CodeFolder | None = None
    workload: dict[str, Any] | None = None
    deferred: tuple[Manifest, ...] = ()
    finished: str | None = None
    restarts: bool = False

    @property
    def exists(self) -> bool:
        """Whether the cluster has the job already."""
        return self.config_map is not None or self.workload is not None

    @property
    def restored(self) -> bool:
        """Whether the job exists, and its ConfigMap is made again."""
        return self.config_map is None and self.workload is not None


class ApplyResult(NamedTuple):
    """An object, and the result of applying it."""

    manifest: Manifest
    applied: Applied


def make_plan(
    cluster: Cluster | None, job: TrainingJob, *, base: Path, take_over: bool = False
) -> Plan:
    """Choose workload kind, rendezvous and run of a job, and render its objects. What was chosen
    when the job was first applied stays.

    Args:
        cluster: the cluster; None to plan without one.
        job: the job.
        base: folder that its relative paths start from.
        take_over: take over checkpoints locked by another run.

    Returns:
        The plan.

    Raises:
        KdistError: the job cannot be applied as it is.
    """
    job = job.with_replicas()
    if job.spec.suspend and job.spec.queue is not None:  # whose workload Kueue starts by itself
        name = job.metadata.name
        raise KdistError(
            f"{name} has spec.suspend: true and is in queue {job.spec.queue}, but Kueue starts "
            "what is in its queues",
            hint=f"remove spec.suspend and apply the job, then: kdist suspend {name}",
            next_command="kdist explain spec.suspend",
        )
    job, folder, code = place_code(job, base)
    if cluster is None:
        return replace(_plan_alone(job, folder, take_over=take_over, code=code), folder=folder)
    job = job.model_copy(
        update={"metadata": job.metadata.model_copy(update={"namespace": cluster.namespace})}
    )
    config_map = find_config_map(cluster, job.metadata.name)
    if find_owning_resource(config_map) is not None:
        raise refuse_direct(cluster, job.metadata.name)
    decided, backend, workload = _find_placed(cluster, job, config_map)
    state = None if workload is None else backends.get(backend).read(workload)
    if config_map is not None and workload is not None:
        _check_restart(job, config_map)
    job, unlocked = lock_packages(job, _find_spec(config_map).get("install"))
    placement = Placement(
        backend,
        _choose_rendezvous(cluster, job, decided),
        _choose_run(cluster, job, decided),
        suspended=_is_suspended(job, backend, state),
        take_over=take_over,
        code=code,
    )
    finished = None if state is None else state.finished
    warnings = [*unlocked, *render.warn(job, placement)]
    if state is not None and not finished and state.suspended and ASKED in decided:
        warnings.append(describe_suspended(job.metadata.name, cluster.namespace))
    rendered = render.render(job, placement)
    kind = backends.get(backend)
    own = (kind.api_version, kind.kind)
    manifests = [
        each  # else with the immutable fields that follow from its first number of nodes
        if workload is None or (each.api_version, each.kind) != own
        else replace(each, document=kind.keep(each.document, workload))
        for each in rendered
    ]
    pods = select_workload(rendered, backend)
    # a finished workload stays for inspection until a restart creates it again
    if finished:
        manifests = [each for each in manifests if each.kind not in {one.kind for one in pods}]
    stays = workload is not None and any(is_new(each, manifests) for each in pods)
    plan = Plan(job, placement, manifests, warnings, config_map, folder=folder, workload=workload)
    return replace(plan, deferred=tuple(pods) if stays else (), finished=finished)


def _plan_alone(
    job: TrainingJob,
    folder: CodeFolder | None,
    *,
    take_over: bool,
    code: dict[str, bytes] | None,
) -> Plan:
    """The plan without a cluster: what a cluster would be asked for is taken for granted."""
    kind = backends.choose(set(), job) if job.spec.backend == "auto" else job.spec.backend
    namespace = job.metadata.namespace or f"$({NAMESPACE_VARIABLE})"
    placement = Placement(
        kind,
        backends.choose_rendezvous(job),
        f"{namespace}/{job.run or job.metadata.name}",
        suspended=job.spec.suspend,
        take_over=take_over,
        code=code,
    )
    warnings = render.warn(job, placement)
    if folder is not None and folder.place:
        warnings.append(f"only `kdist apply` sends the files of spec.code to {folder.place}")
    return Plan(job, placement, render.render(job, placement), warnings)


def refuse_direct(cluster: Cluster, name: str) -> KdistError:
    """The error of a job that is a TrainingJob, and was to be applied without one."""
    return KdistError(
        f"{name} in namespace {cluster.namespace} is a TrainingJob: kdist's controller creates its "
        "objects",
        hint=f"without --direct the TrainingJob is applied; or `kdist delete {name} "
        f"-n {cluster.namespace}` keeps the checkpoints, and `kdist apply --direct` continues from "
        "them",
        next_command=f"kdist status {name} -n {cluster.namespace}",
    )


def _choose_run(cluster: Cluster, job: TrainingJob, decided: dict[str, str]) -> str:
    """The run that the job names, else the current one, else a new one."""
    if job.run is not None:
        return f"{cluster.namespace}/{job.run}"
    # a previous run with a name that the job no longer has is not continued
    current = decided.get(RUN_ID) if RUN not in decided else None
    return current or secrets.token_hex(4)


def _find_placed(
    cluster: Cluster, job: TrainingJob, config_map: dict[str, Any] | None
) -> tuple[dict[str, str], str, dict[str, Any] | None]:
    """What was chosen for the job before, its workload kind, and its workload. Raises `KdistError`
    if the kind is another one than the job asks for, `ForeignError` for a workload of this name
    that has another owner.
    """
    name = job.metadata.name
    live = find_live_workload(cluster, name) if config_map is None else None
    annotations = documents.mapping(config_map, "metadata", "annotations")
    decided = {key: each for key, each in annotations.items() if isinstance(each, str)}
    if live is not None:
        decided = live.decided
    check_kind(cluster, job, decided.get(BACKEND, ""))
    backend = choose_backend(cluster, job, decided)
    if live is not None:
        return decided, backend, live.document
    if config_map is None:
        return decided, backend, None
    kind = backends.get(backend)
    found = cluster.look_up(kind.api_version, kind.kind, name)
    if found is not None:
        owner = JobOwner(cluster.namespace, name, backend=backend)
        owner.check(found, api_version=kind.api_version, kind=kind.kind)
    return decided, backend, found


def _is_suspended(job: TrainingJob, backend: str, state: WorkloadState | None) -> bool:
    """Whether to render the workload as suspended: yes if the job says so, and for a new job with a
    queue, because Kueue starts it; otherwise an existing workload keeps its state.
    """
    if job.spec.suspend:
        return True
    if state is None:
        return job.spec.queue is not None and not backends.get(backend).keeps_alive
    return state.suspended or (state.finished is not None and backends.get(backend).keeps_alive)


def _check_restart(job: TrainingJob, config_map: dict[str, Any]) -> None:
    """Raise `KdistError` if the job asks for a restart by a changed `restartedAt`, which only the
    controller acts on.
    """
    before = _find_spec(config_map).get("restartedAt")
    if job.spec.restarted_at not in (None, before):
        name = job.metadata.name
        raise KdistError(
            f"spec.restartedAt of {name} has changed, but only kdist's controller restarts a job "
            "for that",
            hint="apply it with --set spec.restartedAt=null, and restart it by command",
            next_command=f"kdist restart {name} -n {job.metadata.namespace}",
        )


def _find_spec(config_map: dict[str, Any] | None) -> dict[str, Any]:
    """The spec of the job as it was last applied; empty if that was by another version."""
    try:
        found: dict[str, Any] = parse_json((config_map or {})["data"]["job.json"])["spec"]
    except (KeyError, TypeError, ValueError, AttributeError):
        found = {}
    return found if isinstance(found, dict) else {}


def describe_suspended(name: str, namespace: str) -> str:
    """What is said of a job that is suspended, and that was applied."""
    return f"{name} stays suspended: `kdist resume {name} -n {namespace}` starts it"


def objects_of(
    cluster: Cluster, name: str, backend: str = "", *, makers: frozenset[str] = frozenset()
) -> JobObjects:
    """What creates, changes and deletes the objects of a job."""
    from kdist.cluster import JobObjects

    return JobObjects(cluster, JobOwner(cluster.namespace, name, backend, makers=makers))


def find_config_map(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """The job's ConfigMap, or None. Raises `ForeignError` for a ConfigMap of this name that has
    another owner.
    """
    found = cluster.look_up("v1", "ConfigMap", name)
    if found is not None:
        JobOwner(cluster.namespace, name).check(found, api_version="v1", kind="ConfigMap")
    return found


def check_kind(cluster: Cluster, job: TrainingJob, decided: str) -> None:
    """Raise `KdistError` if the job asks for another workload kind than was decided for it."""
    if decided and job.spec.backend not in ("auto", decided):
        name, delete = job.metadata.name, f"kdist delete {job.metadata.name} -n {cluster.namespace}"
        hint = f"`{delete}` keeps the checkpoints, and the next apply resumes from them"
        asked = f"the job file has {job.spec.backend}"
        raise backends.refuse_kind(name, decided, asked, hint=hint, command=delete)


def choose_backend(cluster: Cluster, job: TrainingJob, decided: Mapping[str, str]) -> str:
    """The workload kind of the job: that of its file, of what was decided when it was first applied
    (annotations of its ConfigMap), or what the cluster supports.

    Raises:
        KdistError: the cluster does not have it.
    """
    if job.spec.backend != "auto":
        backend = backends.get(job.spec.backend)
        if not decided:
            backends.require(backend, cluster.kinds())
        return backend.name
    return decided.get(BACKEND) or backends.choose(cluster.kinds(), job)


def _choose_rendezvous(cluster: Cluster, job: TrainingJob, decided: dict[str, str]) -> Any:
    if job.spec.rendezvous == "auto" and decided.get(RENDEZVOUS):
        return "c10d" if decided[RENDEZVOUS] == "c10d" else "kubernetes"
    if job.spec.rendezvous != "auto":
        return backends.choose_rendezvous(job)
    wanted = [
        Right(verb, rbac.RBAC, kind)
        for kind in ("Role", "RoleBinding")
        for verb in ("get", "create", "patch")
    ]
    # Users may grant only permissions that they have, and the Role grants get and update of a
    # ConfigMap.
    wanted += [Right(verb, "v1", "ConfigMap") for verb in ("get", "update")]
    return backends.choose_rendezvous(job, may_create_role=not rbac.find_missing(cluster, wanted))

"""The plan of a job for a cluster: workload kind, rendezvous and run are decided once and kept in
the job's ConfigMap. The folder of `spec.code` is read into memory, to be sent in a ConfigMap.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist import backends, rbac, render
from kdist.backends import Placement
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.manifest import Manifest
from kdist.rbac import Right
from kdist.spec import RUN, TrainingJob
from kdist.status import ASKED, BACKEND, NAMESPACE_VARIABLE, RENDEZVOUS, RUN_ID, WorkloadState

if TYPE_CHECKING:
    from kdist.cluster import Cluster

# A ConfigMap holds 1 MiB; whoever names a folder far beyond that should hear of it before all of it
# has been read.
MOST_BYTES = 64 * 1024 * 1024
_LEFT_OUT = frozenset({"__pycache__", "node_modules"})


def read_code(job: TrainingJob, base: Path) -> dict[str, bytes] | None:
    """Files of the job's code folder by their path with `/`; None if it has none. `base` is where
    its path starts.

    Hidden files, byte code and links that lead out of the folder stay behind. Raises `UsageError`
    if there is no such folder, `KdistError` if it is far too big.
    """
    if job.spec.code is None:
        return None
    folder = (base / Path(job.spec.code).expanduser()).resolve()
    if not folder.is_dir():
        raise UsageError(
            f"spec.code: there is no folder {folder}", hint="its path is relative to the job file"
        )
    found: dict[str, bytes] = {}
    total = 0
    for path in _files(folder):
        total += path.stat().st_size
        if total > MOST_BYTES:
            raise KdistError(
                f"spec.code: {folder} holds more than {MOST_BYTES // 2**20} MiB",
                hint="put data and weights on a claim (spec.data), large code into the image",
            )
        found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part in _LEFT_OUT for part in parts):
            continue
        if path.is_file() and path.resolve().is_relative_to(folder):
            yield path


@dataclass(frozen=True)
class Plan:
    """A job as it would be sent: its objects, and what its user should know first.

    `config_map` is the job's ConfigMap as the cluster has it, None for a job that is not there.
    `revived`: the job is there, and its workload is gone, by its TTL for instance.
    """

    job: TrainingJob
    placement: Placement
    manifests: list[Manifest]
    warnings: list[str]
    config_map: dict[str, Any] | None = None
    revived: bool = False

    @property
    def exists(self) -> bool:
        """Whether the cluster has the job already."""
        return self.config_map is not None


def make_plan(
    cluster: Cluster | None, job: TrainingJob, *, base: Path, take_over: bool = False
) -> Plan:
    """Decide what the job becomes on the cluster; what was decided when it was first sent stays.
    None: without a cluster.

    `base` is the folder that its relative paths start from. Raises `KdistError` where the job
    cannot be sent as it is.
    """
    code = read_code(job, base)
    if cluster is None:
        kind = backends.choose(set(), job) if job.spec.backend == "auto" else job.spec.backend
        run_id = (
            f"{job.metadata.namespace or f'$({NAMESPACE_VARIABLE})'}/{job.run or job.metadata.name}"
        )
        placement = Placement(
            kind, backends.choose_rendezvous(job), run_id, take_over=take_over, code=code
        )
        return Plan(job, placement, render.render(job, placement), render.warn(job, placement))
    job = job.model_copy(
        update={"metadata": job.metadata.model_copy(update={"namespace": cluster.namespace})}
    )
    config_map = find_config_map(cluster, job.metadata.name)
    decided = _annotations(config_map)
    _check_kind(cluster, job, decided.get(BACKEND, ""))
    backend = _choose_backend(cluster, job, decided)
    workload = None if config_map is None else _find_workload(cluster, backend, job.metadata.name)
    state = None if workload is None else backends.get(backend).read(workload)
    placement = Placement(
        backend=backend,
        rendezvous=_choose_rendezvous(cluster, job, decided),
        run_id=_choose_run(cluster, job, decided),
        suspended=_is_suspended(job, backend, state),
        take_over=take_over,
        code=code,
    )
    warnings = [
        *render.warn(job, placement),
        *_say_state(cluster, job.metadata.name, state, decided),
    ]
    manifests = [_keep(each, backend, workload) for each in render.render(job, placement)]
    # what it ran stays to be looked at, until it is made anew
    if state is not None and state.finished:
        manifests = [
            each
            for each in manifests
            if each.kind not in (backends.get(backend).kind, "TrainingRuntime")
        ]
    return Plan(
        job,
        placement,
        manifests,
        warnings,
        config_map,
        revived=config_map is not None and workload is None,
    )


def _choose_run(cluster: Cluster, job: TrainingJob, decided: dict[str, str]) -> str:
    """The run that the job names, else the one that was begun, else a new one."""
    if job.run is not None:
        return f"{cluster.namespace}/{job.run}"
    # that one went by a name which the job does not give now
    begun = decided.get(RUN_ID) if RUN not in decided else None
    return begun or secrets.token_hex(4)


def _keep(manifest: Manifest, backend: str, workload: dict[str, Any] | None) -> Manifest:
    """The workload with those fields of the one that is there that follow from its first number of
    nodes and cannot change.
    """
    kind = backends.get(backend)
    if workload is None or (manifest.api_version, manifest.kind) != (kind.api_version, kind.kind):
        return manifest
    return replace(manifest, document=kind.keep(manifest.document, workload))


def _find_workload(cluster: Cluster, backend: str, name: str) -> dict[str, Any] | None:
    """The job's workload as it is; None if it is not there. Raises `ForeignError` for one of this
    name that is not the job's.
    """
    from kdist.cluster import check_owner

    kind = backends.get(backend)
    try:
        found = cluster.get(kind.api_version, kind.kind, name)
    except NotFoundError:
        return None
    check_owner(found, name, api_version=kind.api_version, kind=kind.kind)
    return found


def _is_suspended(job: TrainingJob, backend: str, state: WorkloadState | None) -> bool:
    """A new job with a queue is started by Kueue, where the kind can be suspended; one that is
    there stays as it is.
    """
    if state is None:
        return job.spec.queue is not None and not backends.get(backend).parks
    return state.suspended or (state.finished is not None and backends.get(backend).parks)


def _say_state(
    cluster: Cluster, name: str, state: WorkloadState | None, decided: dict[str, str]
) -> Iterator[str]:
    if state is None:
        return
    if state.finished:
        restart = f"kdist restart {name} -n {cluster.namespace}"
        yield (
            f"{name} has {state.finished}: what is sent now takes effect with `{restart}`, "
            "from its last checkpoint"
        )
    elif state.suspended and ASKED in decided:
        yield (
            f"{name} was {decided[ASKED]} and stays so: `kdist resume {name} -n "
            f"{cluster.namespace}` starts it"
        )


def find_config_map(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """The job's ConfigMap, None if there is none. Raises `ForeignError` for one of this name that
    is not the job's.
    """
    from kdist.cluster import check_owner

    try:
        found = cluster.get("v1", "ConfigMap", name)
    except NotFoundError:
        return None
    check_owner(found, name, api_version="v1", kind="ConfigMap")
    return found


def get_config_map(cluster: Cluster, name: str) -> dict[str, Any]:
    """The job's ConfigMap. Raises `NotFoundError` if there is no such job."""
    found = find_config_map(cluster, name)
    if found is None:
        raise NotFoundError(
            f"there is no job {name} in namespace {cluster.namespace}",
            next_command=f"kdist get -n {cluster.namespace}",
        )
    return found


def _annotations(config_map: dict[str, Any] | None) -> dict[str, str]:
    return dict(((config_map or {}).get("metadata") or {}).get("annotations") or {})


def _check_kind(cluster: Cluster, job: TrainingJob, decided: str) -> None:
    if decided and job.spec.backend not in ("auto", decided):
        name, delete = job.metadata.name, f"kdist delete {job.metadata.name} -n {cluster.namespace}"
        raise KdistError(
            (
                f"{name} runs as backend {decided}, and the job file says {job.spec.backend}: "
                "a running job keeps its kind"
            ),
            hint=f"`{delete}` keeps the checkpoints, and the next apply resumes from them",
            next_command=delete,
        )


def _choose_backend(cluster: Cluster, job: TrainingJob, decided: dict[str, str]) -> str:
    if job.spec.backend != "auto":
        backend = backends.get(job.spec.backend)
        if not decided and (backend.api_version, backend.kind) not in cluster.kinds():
            raise KdistError(
                (
                    f"backend {backend.name}: this cluster has no {backend.kind} "
                    f"({backend.api_version})"
                ),
                hint="install its operator, or let `backend: auto` choose what the cluster has",
                next_command="kdist doctor",
            )
        return backend.name
    return decided.get(BACKEND) or backends.choose(cluster.kinds(), job)


def _choose_rendezvous(cluster: Cluster, job: TrainingJob, decided: dict[str, str]) -> Any:
    if job.spec.rendezvous == "auto" and decided.get(RENDEZVOUS):
        return decided[RENDEZVOUS]
    if job.spec.rendezvous != "auto":
        return backends.choose_rendezvous(job)
    wanted = [
        Right(verb, rbac.RBAC, kind)
        for kind in ("Role", "RoleBinding")
        for verb in ("get", "create", "patch")
    ]
    # Nobody may grant what he does not hold, and the Role lets its account get and update a
    # ConfigMap.
    wanted += [Right(verb, "v1", "ConfigMap") for verb in ("get", "update")]
    return backends.choose_rendezvous(job, may_create_role=not rbac.find_missing(cluster, wanted))

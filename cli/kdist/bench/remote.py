"""A bench on a cluster: applies its job, waits for it, reads its logs and deletes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kdist import deploy, rbac
from kdist.bench.result import Result, read_events
from kdist.errors import Code, KdistError, UsageError
from kdist.job import cluster as jobs
from kdist.job.cluster import logs
from kdist.job.job import LogSelection
from kdist.spec import TrainingJob

if TYPE_CHECKING:
    from kdist.cluster import Cluster


def measure(
    cluster: Cluster,
    job: TrainingJob,
    *,
    base: Path,
    keep: bool,
    timeout: float | None,
    notify: Callable[[str], None],
) -> Result:
    """Run the bench on the cluster. Its job is deleted afterwards, unless it failed or `keep` says
    so; relative paths of the job start from `base`. Raises `UsageError` if the cluster has a job of
    this name, and `KdistError` if the job cannot be applied, TIMEOUT, or JOB_FAILED.
    """
    name = job.metadata.name
    plan = deploy.make_plan(cluster, job, base=base)
    if plan.exists:
        raise UsageError(
            f"{name} is on the cluster already",
            next_command=f"kdist delete {name} -n {cluster.namespace}",
        )
    if not keep:  # check both rights before anything is created
        rbac.require(cluster, [*rbac.to_send(plan.manifests), *rbac.to_delete(plan.manifests)])
    for _ in deploy.send_plan(
        cluster, plan, base=base, notify=notify, warn=lambda text: notify(f"Warning: {text}")
    ):
        pass
    try:
        jobs.wait_for(cluster, name, timeout=timeout, notify=notify)
        lines = (
            line.text
            for line in logs.read(
                cluster, jobs.fetch_snapshot(cluster, name), LogSelection(), notify=notify
            )
        )
        result = read_events(lines)
    except KeyboardInterrupt:
        _delete(cluster, name, notify)
        raise
    except KdistError as error:
        error.hint = (
            error.hint
            or f"its objects are kept; `kdist delete {name} -n {cluster.namespace}` deletes them"
        )
        raise
    if not result.done:
        raise KdistError(f"{name} has ended, and its logs contain no result", code=Code.JOB_FAILED)
    if not keep:
        _delete(cluster, name, notify)
    return result


def _delete(cluster: Cluster, name: str, notify: Callable[[str], None]) -> None:
    for _ in deploy.remove(cluster, name, deploy.find_objects(cluster, name)[0], wait=None):
        pass
    notify(f"deleted {name}")

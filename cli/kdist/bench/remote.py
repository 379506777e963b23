"""A bench on a cluster: sent as a job, waited for, its logs read, and taken away again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kdist import deploy, jobs, rbac
from kdist.bench.result import Result, read_events
from kdist.errors import Code, KdistError, UsageError
from kdist.jobs import logs
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
    tell: Callable[[str], None],
) -> Result:
    """Run the bench on the cluster; what has failed, or shall be kept, stays there, all else goes
    when it is over.

    Raises `KdistError`: what keeps it from being sent, TIMEOUT after `timeout` seconds, JOB_FAILED.
    """
    name = job.metadata.name
    plan = deploy.make_plan(cluster, job, base=base)
    if plan.exists:
        raise UsageError(
            f"{name} is on the cluster already",
            next_command=f"kdist delete {name} -n {cluster.namespace}",
        )
    for text in plan.warnings:
        tell(f"Warning: {text}")
    if not keep:  # what is sent has to be taken away again
        rbac.require(cluster, [*rbac.to_send(plan.manifests), *rbac.to_delete(plan.manifests)])
    for _ in deploy.send(cluster, plan):
        pass
    tell(f"sent {name} to namespace {cluster.namespace} as {plan.placement.backend}")
    try:
        jobs.wait_for(cluster, name, timeout=timeout, tell=tell)
        lines = (
            line.text
            for line in logs.read(
                cluster, jobs.fetch_snapshot(cluster, name), logs.LogRequest(), tell=tell
            )
        )
        result = read_events(lines)
    except KeyboardInterrupt:
        _take_away(cluster, name, tell)
        raise
    except KdistError as error:
        error.hint = (
            error.hint
            or f"it stays for a look: kdist delete {name} -n {cluster.namespace} takes it away"
        )
        raise
    if not result.done:
        raise KdistError(f"{name} has ended and its logs hold no result", code=Code.JOB_FAILED)
    if not keep:
        _take_away(cluster, name, tell)
    return result


def _take_away(cluster: Cluster, name: str, tell: Callable[[str], None]) -> None:
    for _ in deploy.remove(cluster, name, deploy.find_objects(cluster, name)[0], wait=None):
        pass
    tell(f"{name} is taken away")

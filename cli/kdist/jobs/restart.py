"""Restart: all ranks anew, from the last checkpoint, or from nothing where that is asked for."""

from __future__ import annotations

import secrets
from dataclasses import replace

from kdist import deploy, rbac
from kdist.errors import NotFoundError
from kdist.jobs import checkpoints, job, suspend, wait
from kdist.jobs.job import ClusterJob, Document
from kdist.jobs.wait import Tell
from kdist.manifest import Manifest
from kdist.rbac import Right

_GONE_SECONDS = 120.0


def restart(
    target: ClusterJob, *, fresh: bool, wait: bool, timeout: float | None, tell: Tell
) -> str:
    """Start all ranks anew; returns the sentence that says so.

    A job that is over is made anew and goes on from its last checkpoint; one that had succeeded has
    nothing left to do, unless `fresh` puts its checkpoints aside. Raises `KdistError` where pods or
    objects do not go in time.
    """
    workload = _workload(target)
    state = target.backend.read(workload) if workload else None
    anew = (
        fresh
        or workload is None
        or state is None
        or state.finished is not None
        or target.backend.keeps_template
    )
    if fresh:
        target = replace(target, placement=replace(target.placement, run_id=secrets.token_hex(4)))
    manifests = job.render_anew(target) if anew else []  # first of all: it may not be possible
    _require(target, workload, manifests, fresh=fresh)
    leaving = [pod for pod in target.pods() if not pod.over]
    if workload and state and not state.finished and not state.suspended:
        suspend.suspend_workload(target)
        exits = suspend.wait_for_pods(target, leaving, timeout=timeout, tell=tell)
        if exits.step is not None:
            tell(f"saved after step {exits.step:,}")
    moved = None
    if fresh:
        moved = checkpoints.ask(target, "aside", tell=tell).get("moved")
    if anew:
        _make_anew(target, workload, manifests)
    else:
        deploy.forget_end(target.cluster, target.name)
        suspend.resume_workload(target)
    target.ask(None)
    done = f"{target.name} restarted" + (f"; its old checkpoints are in {moved}" if moved else "")
    if not wait:
        return f"{done}. Next: {target.command('status', '-w')}"
    return f"{done}{suspend.wait_until_running(target, timeout=timeout, tell=tell)}"


def _require(
    target: ClusterJob, workload: Document | None, manifests: list[Manifest], *, fresh: bool
) -> None:
    """All steps or none: to end the pods, to look into the checkpoints, to make the workload
    anew.
    """
    wanted = [*target.patch_rights(), *rbac.to_send(manifests)]
    if manifests and workload is not None:
        wanted.append(
            Right("delete", target.backend.api_version, target.backend.kind, name=target.name)
        )
    if fresh:
        wanted += checkpoints.RIGHTS
    rbac.require(target.cluster, wanted)


def _workload(target: ClusterJob) -> Document | None:
    try:
        return target.workload()
    except NotFoundError:
        return None


def _make_anew(target: ClusterJob, workload: Document | None, manifests: list[Manifest]) -> None:
    # or it would go with the old workload, from under the new one
    deploy.drop_owner(target.cluster, target.name)
    if workload is not None:
        backend = target.backend
        deploy.keep_runtime(target.cluster, manifests)
        kind = (backend.api_version, backend.kind, target.name)
        target.cluster.remove(*kind, job=target.name, propagation="Foreground")
        wait.wait_until(
            lambda: True if _workload(target) is None and not target.pods() else None,
            timeout=_GONE_SECONDS,
            what=f"the old {backend.kind} {target.name} and its pods to go",
            tell=lambda _: None,
            next_command=target.command("status"),
        )
    deploy.forget_end(target.cluster, target.name)
    job.send(target, manifests)

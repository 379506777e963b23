"""Restarts a job: all ranks start again, from the last checkpoint or from scratch."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import UTC, datetime

from kdist import deploy, rbac
from kdist.errors import NotFoundError
from kdist.job.cluster import checkpoints, job, review, suspend, training_job, wait
from kdist.job.cluster.job import ClusterJob, Document
from kdist.job.cluster.wait import Notify
from kdist.manifest import Manifest
from kdist.rbac import Right
from kdist.status.pods import describe_saved

_DELETE_TIMEOUT = 120.0


def restart(
    target: ClusterJob, *, fresh: bool, wait: bool, timeout: float | None, notify: Notify
) -> str:
    """Restart all ranks of a job. The workload of a job that has finished is re-created.

    Args:
        target: the job.
        fresh: archive the checkpoints and start from scratch. Without it, a job that has succeeded
            has nothing left to do.
        wait: wait until it trains.
        timeout: seconds to wait; None for a default.
        notify: receives messages about progress.

    Returns:
        The result as a message.

    Raises:
        KdistError: pods or objects do not end in time (TIMEOUT).
    """
    if target.is_resource:
        return _restart_resource(target, fresh=fresh, wait=wait, timeout=timeout, notify=notify)
    workload = _workload(target)
    state = target.backend.read(workload) if workload else None
    recreate = (
        fresh
        or workload is None
        or state is None
        or state.finished is not None
        or target.backend.keeps_template
    )
    manifests = job.render_objects(target) if recreate else []  # may fail: first
    _require(target, workload, manifests, fresh=fresh)
    review.check(target, manifests, workload)
    if fresh:
        target = replace(target, placement=replace(target.placement, run_id=secrets.token_hex(4)))
        manifests = job.render_objects(target)
    leaving = [pod for pod in target.pods() if not pod.over]
    target.record_start()
    if workload and state and not state.finished and not state.suspended:
        suspend.suspend_workload(target)
        exits = suspend.wait_for_pods(target, leaving, timeout=timeout, notify=notify)
        if exits.step is not None:
            notify(describe_saved([exits.step]))
    moved = None
    if fresh:
        moved = checkpoints.run_tool(target, "aside", notify=notify).get("moved")
    if recreate:
        _recreate(target, workload, manifests)
    else:
        deploy.forget_end(target.cluster, target.owner)
        deploy.request_start(target.cluster, target.owner, target.job)
        suspend.resume_workload(target)
    target.record_request(None)
    done = f"{target.name} restarted" + (f"; its old checkpoints are in {moved}" if moved else "")
    if not wait:
        return f"{done}. Next: {target.command('status', '-w')}"
    return f"{done}{suspend.wait_until_running(target, timeout=timeout, notify=notify)}"


def _restart_resource(
    target: ClusterJob, *, fresh: bool, wait: bool, timeout: float | None, notify: Notify
) -> str:
    """Restart a TrainingJob: the controller does it once `restartedAt` has changed. To archive its
    checkpoints, the job is suspended meanwhile.
    """
    rbac.require(target.cluster, [*target.patch_rights(), *(checkpoints.RIGHTS if fresh else ())])
    moved = None
    if fresh:
        if not target.state().finished:
            suspend.suspend(target, wait=True, timeout=timeout, notify=notify)
        moved = checkpoints.run_tool(target, "aside", notify=notify).get("moved")
    leaving = [pod for pod in target.pods() if not pod.over]
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    changed = target.change_resource({"restartedAt": now, "suspend": False})
    training_job.wait_for_answer(target.cluster, changed)
    done = f"{target.name} restarted" + (f"; its old checkpoints are in {moved}" if moved else "")
    if not wait:
        return f"{done}. Next: {target.command('status', '-w')}"
    exits = suspend.wait_for_pods(target, leaving, timeout=timeout, notify=notify)
    if exits.step is not None:
        notify(describe_saved([exits.step]))
    target = _wait_for_objects(target, now, notify=notify)
    return f"{done}{suspend.wait_until_running(target, timeout=timeout, notify=notify)}"


def _wait_for_objects(target: ClusterJob, restarted_at: str, *, notify: Notify) -> ClusterJob:
    """Wait until the controller has created the objects again; returns the job as it is then."""

    def poll() -> ClusterJob | None:
        found = ClusterJob.find(target.cluster, target.name)
        return found if found.job.spec.restarted_at == restarted_at else None

    return wait.wait_until(
        poll,
        timeout=_DELETE_TIMEOUT,
        what=f"the controller to create the objects of {target.name} again",
        notify=notify,
        next_command=target.command("status"),
    )


def _require(
    target: ClusterJob, workload: Document | None, manifests: list[Manifest], *, fresh: bool
) -> None:
    """Check the rights to all steps before the first: to end the pods, to archive the checkpoints
    and to re-create the workload.
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


def _recreate(target: ClusterJob, workload: Document | None, manifests: list[Manifest]) -> None:
    # or the garbage collector would delete them with the old workload
    deploy.drop_owner(target.cluster, target.name)
    if workload is not None:
        backend = target.backend
        deploy.keep_runtime(target.cluster, target.name, manifests)
        kind = (backend.api_version, backend.kind, target.name)
        target.objects.remove(*kind, propagation="Foreground")
        wait.wait_until(
            lambda: True if _workload(target) is None and not target.pods() else None,
            timeout=_DELETE_TIMEOUT,
            what=f"the old {backend.kind} {target.name} and its pods to be deleted",
            notify=lambda _: None,
            next_command=target.command("status"),
        )
    deploy.forget_end(target.cluster, target.owner)
    deploy.request_start(target.cluster, target.owner, target.job)
    job.apply_objects(target, manifests)

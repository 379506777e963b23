"""Restarts a job: all ranks start again, from the last checkpoint or from scratch."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import UTC, datetime

from kdist import deploy, rbac
from kdist.errors import NotFoundError
from kdist.job.cluster import applied, checkpoints, review, suspend, wait
from kdist.job.cluster.applied import AppliedJob, Document
from kdist.job.job import Change
from kdist.manifest import Manifest
from kdist.rbac import Right
from kdist.status.pods import describe_saved

_DELETE_TIMEOUT = 120.0


def restart(target: AppliedJob, how: Change, *, fresh: bool, confirmed: bool) -> str:
    """Restart all ranks of a job. The workload of a job that has finished is re-created. See
    `Job.restart`.
    """
    notify = target.dialog.notify
    if how.dry_run == "client":
        what = (
            "from scratch, with its checkpoints archived" if fresh else "from its last checkpoint"
        )
        return f"{target.name} would be restarted {what} (client dry run)"
    if fresh and not confirmed:
        target.dialog.confirm(
            f"--fresh restarts {target.name} at step 0",
            f"Restart {target.name} in namespace {target.namespace} at step 0? Its checkpoints are "
            "archived.",
        )
    if target.is_resource:
        return _restart_resource(target, how, fresh=fresh)
    workload = _workload(target)
    state = target.backend.read(workload) if workload else None
    recreate = (
        fresh
        or workload is None
        or state is None
        or state.finished is not None
        or target.backend.keeps_template
    )
    manifests = applied.render_objects(target) if recreate else []  # may fail: first
    _require(target, workload, manifests, fresh=fresh)
    review.check(target, manifests, workload)
    if fresh:
        target = replace(target, placement=replace(target.placement, run_id=secrets.token_hex(4)))
        manifests = applied.render_objects(target)
    leaving = [pod for pod in target.pods() if not pod.over]
    target.record_start()
    if workload and state and not state.finished and not state.suspended:
        suspend.suspend_workload(target)
        exits = suspend.wait_for_pods(target, leaving, timeout=how.timeout)
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
    if not how.wait:
        return f"{done}. Next: {target.command('status', '-w')}"
    return f"{done}{suspend.wait_until_running(target, timeout=how.timeout)}"


def _restart_resource(target: AppliedJob, how: Change, *, fresh: bool) -> str:
    """Restart a TrainingJob: the controller does it once `restartedAt` has changed. To archive its
    checkpoints, the job is suspended meanwhile.
    """
    notify = target.dialog.notify
    rbac.require(target.cluster, [*target.patch_rights(), *(checkpoints.RIGHTS if fresh else ())])
    moved = None
    if fresh:
        if not target.state().finished:
            suspend.suspend(target, Change(timeout=how.timeout))
        moved = checkpoints.run_tool(target, "aside", notify=notify).get("moved")
    leaving = [pod for pod in target.pods() if not pod.over]
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    changed = target.change_resource({"restartedAt": now, "suspend": False})
    wait.wait_for_answer(target.cluster, changed)
    done = f"{target.name} restarted" + (f"; its old checkpoints are in {moved}" if moved else "")
    if not how.wait:
        return f"{done}. Next: {target.command('status', '-w')}"
    exits = suspend.wait_for_pods(target, leaving, timeout=how.timeout)
    if exits.step is not None:
        notify(describe_saved([exits.step]))
    target = _wait_for_objects(target, now)
    return f"{done}{suspend.wait_until_running(target, timeout=how.timeout)}"


def _wait_for_objects(target: AppliedJob, restarted_at: str) -> AppliedJob:
    """Wait until the controller has created the objects again; returns the job as it is then."""

    def poll() -> AppliedJob | None:
        found = AppliedJob.find(target.cluster, target.name, dialog=target.dialog)
        return found if found.job.spec.restarted_at == restarted_at else None

    return wait.wait_until(
        poll,
        timeout=_DELETE_TIMEOUT,
        what=f"the controller to create the objects of {target.name} again",
        notify=target.dialog.notify,
        next_command=target.command("status"),
    )


def _require(
    target: AppliedJob, workload: Document | None, manifests: list[Manifest], *, fresh: bool
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


def _workload(target: AppliedJob) -> Document | None:
    try:
        return target.workload()
    except NotFoundError:
        return None


def _recreate(target: AppliedJob, workload: Document | None, manifests: list[Manifest]) -> None:
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
    applied.apply_objects(target, manifests)

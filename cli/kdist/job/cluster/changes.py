"""How a job is changed: object by object, or through its TrainingJob, whose objects the controller
changes. Both have the same methods. And its restart: all ranks start again, from the last
checkpoint or from scratch.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from kdist import deploy, rbac
from kdist.agents.metrics import AgentSample
from kdist.cluster.polling import wait_until
from kdist.errors import NotFoundError
from kdist.job.cluster import agents, applied, checkpoints, review, scale, suspend, wait
from kdist.job.cluster.applied import AppliedJob, Document
from kdist.job.job import Change, Changed
from kdist.manifest import NODES_ANNOTATION, TRAINING_JOB, Manifest
from kdist.rbac import Right
from kdist.status import ASKED, STARTED, Pod, WorkloadState, documents, read_job, read_resource
from kdist.status.documents import annotation
from kdist.status.pods import describe_saved

_DELETE_TIMEOUT = 120.0
_LIMITS_TIMEOUT = 120.0
_RENEWAL_SECONDS = 60.0


def restart(target: AppliedJob, how: Change, *, fresh: bool, confirmed: bool) -> str:
    """Restart all ranks of a job. See `Job.restart`."""
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
    target, moved = target.changes.restart(how, fresh=fresh)
    done = f"{target.name} restarted" + (f"; its old checkpoints are in {moved}" if moved else "")
    if not how.wait:
        return Changed(done, target.command("status", "-w"))
    return f"{done}{suspend.wait_until_running(target, timeout=how.timeout)}"


@dataclass(frozen=True)
class DirectChanges:
    """Changes the objects of a job, which kdist has sent itself."""

    target: AppliedJob

    @property
    def rights(self) -> list[Right]:
        """Rights to change the workload and to record the requested state."""
        backend, name = self.target.backend, self.target.name
        kinds = (("v1", "ConfigMap"), (backend.api_version, backend.kind))
        return [Right("patch", api_version, kind, name=name) for api_version, kind in kinds]

    def require(self, *, dry_run: bool) -> None:
        """Check the rights to all changes before the first. In a dry run the server checks them."""
        if not dry_run:
            by_kueue = suspend.is_queued(self.target)
            rbac.require(self.target.cluster, self.rights[:1] if by_kueue else self.rights)

    def is_suspended(self, state: WorkloadState) -> bool:
        """Whether the job is suspended by a person, not by its queue."""
        return state.suspended and not suspend.is_queued(self.target)

    @property
    def is_asked(self) -> bool:
        """Whether it is recorded that the job is to be suspended."""
        return bool(annotation(self.target.config_map, ASKED))

    def can_resume(self, state: WorkloadState) -> bool:
        """Whether there is anything to resume."""
        return state.suspended or self.is_asked

    def record(self, state: str | None, *, dry_run: bool = False) -> None:
        """Record in the ConfigMap which state the user requested: `suspended`, also with the step
        that was saved, or None for running.
        """
        self.target.annotate({ASKED: state}, dry_run=dry_run)

    def _record_start(self) -> None:
        """Record in the ConfigMap that a user has the job start again now: what its pods do then
        is no failure.
        """
        self.target.annotate({STARTED: datetime.now(UTC).isoformat(timespec="seconds")})

    def suspend(self, *, dry_run: bool = False) -> None:
        """Let the workload or Kueue end the job's pods."""
        target = self.target
        if suspend.is_queued(target):
            suspend.set_active(target, active=False, dry_run=dry_run)
            return
        body = target.backend.suspend_patch(True, nodes=target.job.spec.nodes.max)
        target.patch_workload(body, dry_run=dry_run)

    def resume(self, *, dry_run: bool) -> None:
        """Record it, and let the workload or Kueue make the job's pods again."""
        target = self.target
        self.record(None, dry_run=dry_run)
        if not dry_run:
            self._record_start()
            deploy.request_start(target.cluster, target.owner, target.job)
        self._resume(dry_run=dry_run)

    def _resume(self, *, dry_run: bool = False) -> None:
        target = self.target
        if suspend.is_queued(target):
            suspend.set_active(target, active=True, dry_run=dry_run)
            return
        if not dry_run and target.backend.keeps_alive:
            wait_until(
                lambda: True if documents.is_renewed(target.workload()) else None,
                timeout=_RENEWAL_SECONDS,
                what=f"the controller of {target.name} to notice that it has no pods",
                notify=lambda _: None,
            )
        body = target.backend.suspend_patch(False, nodes=target.job.spec.nodes.max)
        target.patch_workload(body, dry_run=dry_run)

    def resize(self, wanted: AppliedJob, state: WorkloadState, *, dry_run: bool) -> None:
        """Apply the objects with the size of `wanted`: the workload last."""
        target, suspended, workload = self.target, state.suspended, self.target.workload()
        now = applied.render_objects(target, suspended=suspended)
        now = review.keep_immutable(target, now, workload)
        sent = rbac.to_send(now)
        rbac.require(target.cluster, (right for right in sent if right.verb != "create"))
        review.check(target, now, workload, notify=target.dialog.notify if dry_run else None)
        rendered = applied.render_objects(wanted, suspended=suspended)
        manifests = review.keep_immutable(wanted, rendered, workload)
        applied.apply_objects(wanted, manifests, dry_run=True)  # apply all or nothing
        if dry_run:
            return
        pods = [pod for pod in wanted.pods() if not pod.over]
        if any(pod.working for pod in pods):
            rbac.require(wanted.cluster, rbac.on_pods("patch"))
        applied.apply_objects(
            wanted, [one for one in manifests if not applied.is_workload(wanted, one)]
        )
        if not suspended:
            _announce_bounds(wanted, pods)
        applied.apply_objects(
            wanted, [one for one in manifests if applied.is_workload(wanted, one)]
        )

    def restart(self, how: Change, *, fresh: bool) -> tuple[AppliedJob, str | None]:
        """Restart the job. The workload of one that has finished is made again. Returns the job as
        it is then, and where its old checkpoints are.
        """
        target, notify = self.target, self.target.dialog.notify
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
        wanted = [*self.rights, *rbac.to_send(manifests), *(checkpoints.RIGHTS if fresh else ())]
        if manifests and workload is not None:
            kind = target.backend
            wanted.append(Right("delete", kind.api_version, kind.kind, name=target.name))
        rbac.require(target.cluster, wanted)  # to all steps before the first
        review.check(target, manifests, workload)
        if fresh:
            target = replace(
                target, placement=replace(target.placement, run_id=secrets.token_hex(4))
            )
            manifests = applied.render_objects(target)
        leaving = [pod for pod in target.pods() if not pod.over]
        self._record_start()
        if workload and state and not state.finished and not state.suspended:
            self.suspend()
            exits = suspend.wait_for_pods(target, leaving, timeout=how.timeout)
            if exits.step is not None:
                notify(describe_saved([exits.step]))
        moved = checkpoints.archive(target) if fresh else None
        if recreate:
            _recreate(target, workload, manifests)
        else:
            deploy.forget_end(target.cluster, target.owner)
            deploy.request_start(target.cluster, target.owner, target.job)
            self._resume()
        self.record(None)
        return target, moved


@dataclass(frozen=True)
class ControllerChanges:
    """Changes the TrainingJob, and lets the controller do the rest."""

    target: AppliedJob

    @property
    def rights(self) -> list[Right]:
        """Rights to change the TrainingJob."""
        return [Right("patch", *TRAINING_JOB, name=self.target.name)]

    def require(self, *, dry_run: bool) -> None:
        """See `DirectChanges.require`."""
        if not dry_run:
            rbac.require(self.target.cluster, self.rights)

    def is_suspended(self, _: WorkloadState) -> bool:
        """Whether the TrainingJob says so."""
        return read_resource(self.target.resource()).suspended

    can_resume = is_suspended
    is_asked = True

    def record(self, state: str | None, *, dry_run: bool = False) -> None:
        """Nothing: its spec says so."""

    def suspend(self, *, dry_run: bool = False) -> None:
        """Let the controller end the job's pods."""
        self._change({"suspend": True}, dry_run=dry_run)

    def resume(self, *, dry_run: bool) -> None:
        """Let the controller make the job's pods again."""
        self._change({"suspend": False}, dry_run=dry_run)

    def _change(self, spec: Mapping[str, Any], *, dry_run: bool = False) -> None:
        """Change fields of the TrainingJob's spec, and wait until the controller acts on that."""
        target, body = self.target, {"spec": dict(spec)}
        changed = target.objects.change(*TRAINING_JOB, target.name, body, dry_run=dry_run)
        if not dry_run:
            wait.wait_for_answer(target.cluster, changed)

    def resize(self, wanted: AppliedJob, _: WorkloadState, *, dry_run: bool) -> None:
        """Change `replicas`, as `kubectl scale` does, where its `nodes` allow the new size, else
        `nodes`.
        """
        self.require(dry_run=dry_run)
        least, most = wanted.job.spec.nodes.min, wanted.job.spec.nodes.max
        found = documents.at(wanted.resource(), "spec", "nodes")
        nodes = {"min": found, "max": found} if isinstance(found, int) else found or {}
        low, high = documents.integer(nodes, "min"), documents.integer(nodes, "max")
        spec: dict[str, Any] = {"nodes": {"min": least, "max": most}, "replicas": None}
        if least == low and high is not None and most <= high:
            spec = {"replicas": most if most < high else None}
        self._change(spec, dry_run=dry_run)

    def restart(self, how: Change, *, fresh: bool) -> tuple[AppliedJob, str | None]:
        """Restart the job: the controller does it once `restartedAt` has changed. To archive its
        checkpoints, the job is suspended meanwhile. Returns as `DirectChanges.restart`.
        """
        target, notify = self.target, self.target.dialog.notify
        rbac.require(target.cluster, [*self.rights, *(checkpoints.RIGHTS if fresh else ())])
        moved = None
        if fresh:
            if not target.state().finished:
                suspend.suspend(target, Change(timeout=how.timeout))
            moved = checkpoints.archive(target)
        leaving = [pod for pod in target.pods() if not pod.over]
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self._change({"restartedAt": now, "suspend": False})
        if how.wait:
            exits = suspend.wait_for_pods(target, leaving, timeout=how.timeout)
            if exits.step is not None:
                notify(describe_saved([exits.step]))
            target = _wait_for_objects(target, now)
        return target, moved


def _wait_for_objects(target: AppliedJob, restarted_at: str) -> AppliedJob:
    """Wait until the controller has created the objects again; returns the job as it is then."""

    def poll() -> AppliedJob | None:
        found = AppliedJob.find(target.cluster, target.name, dialog=target.dialog)
        made_from = documents.text(read_job(found.config_map), "spec", "restartedAt")
        return found if made_from == restarted_at else None

    return wait_until(
        poll,
        timeout=_DELETE_TIMEOUT,
        what=f"the controller to create the objects of {target.name} again",
        notify=target.dialog.notify,
        next_command=target.command("status"),
    )


def _announce_bounds(wanted: AppliedJob, pods: list[Pod]) -> None:
    """Wait until every running agent knows the new limits. Annotating a pod makes its kubelet
    update the mounted ConfigMap at once.
    """
    nodes = wanted.job.spec.nodes
    running = [pod for pod in pods if pod.working]
    objects = wanted.pod_objects() if running else wanted.objects
    for pod in running:
        body = {"metadata": {"annotations": {NODES_ANNOTATION: f"{nodes.min}:{nodes.max}"}}}
        objects.change("v1", "Pod", pod.name, body)

    def poll() -> bool | None:
        samples = agents.fetch_samples(wanted, wanted.pods(), timeout=agents.TIMEOUT)
        return True if know_bounds(samples.values(), nodes.min, nodes.max) else None

    if running:
        limits = scale.describe_nodes(nodes.min, nodes.max)
        what = f"the agents of {wanted.name} to learn the new limits, {limits}"
        wait_until(poll, timeout=_LIMITS_TIMEOUT, what=what, notify=wanted.dialog.notify)


def know_bounds(samples: Iterable[AgentSample], least: int, most: int) -> bool:
    """Whether every agent that reports limits has these. One whose run is over reads no new ones,
    though it stays alive in a StatefulSet.
    """
    at_work = (each.status for each in samples if each.status.get("exit") is None)
    reported = [bounds for each in at_work if isinstance(bounds := each.get("nodes"), dict)]
    return all((each.get("min"), each.get("max")) == (least, most) for each in reported)


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
        wait_until(
            lambda: True if _workload(target) is None and not target.pods() else None,
            timeout=_DELETE_TIMEOUT,
            what=f"the old {backend.kind} {target.name} and its pods to be deleted",
            notify=lambda _: None,
            next_command=target.command("status"),
        )
    deploy.forget_end(target.cluster, target.owner)
    deploy.request_start(target.cluster, target.owner, target.job)
    applied.apply_objects(target, manifests)

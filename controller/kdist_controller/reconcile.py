"""Decides what has to be done for a TrainingJob: whether it can be accepted, how it is placed, and
the next actions. The decision depends only on what is observed now, so a controller that was away,
or that was interrupted in the middle of a change, catches up.

A restart is complete when the job's own ConfigMap holds its `restartedAt`; a new size, when it
holds the new number of nodes. Both are written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kdist import backends
from kdist.backends import Placement
from kdist.errors import KdistError
from kdist.manifest import CLAIM, NODES_ANNOTATION, ForeignError, ObjectKey, find_owner
from kdist.spec import KIND, TrainingJob
from kdist.status import ExitRecord, documents
from kdist.status.documents import Document
from kdist_controller.actions import (
    Action,
    AnnounceLimits,
    ApplyObjects,
    Changes,
    DeleteObject,
    ForgetEnd,
    Notice,
    RecordJob,
    RecordOutcome,
    ResizeWorkload,
    SuspendWorkload,
)
from kdist_controller.observation import Observed
from kdist_controller.resource import (
    can_resize,
    can_scale,
    digest_job,
    find_differences,
    list_children,
)
from kdist_controller.status import Decision, Stage, ended_at, is_terminal, report

_POLL_SECONDS = 1.0  # while agents learn new limits
_FOREIGN_SECONDS = 30.0  # until a foreign object of which nothing is heard is looked at again
_GRACE_SECONDS = 30.0  # for kinds that delete themselves after their TTL


def choose_placement(observed: Observed, wanted: TrainingJob) -> Placement:
    """Where and as which run the job runs: as its status says, else as is decided now, by the
    TrainingJob's uid and what the cluster serves. Raises `KdistError` if the job cannot run on this
    cluster.
    """
    status = observed.resource.status
    backend = observed.backend.name if observed.backend else ""
    if not backend:
        backend = wanted.spec.backend
        if backend == "auto":
            backend = backends.choose(observed.kinds, wanted)
        backends.require(backends.get(backend), observed.kinds)
    rendezvous = documents.text(status, "rendezvous") or backends.choose_rendezvous(wanted)
    run_id = documents.text(status, "runId")
    if not run_id:
        namespace, uid = observed.resource.key.namespace, observed.resource.uid
        run_id = (
            f"{namespace}/{wanted.run}"
            if wanted.run is not None
            else hashlib.sha256(uid.encode()).hexdigest()[:8]
        )
    return Placement(backend, "c10d" if rendezvous == "c10d" else "kubernetes", run_id)


def check_acceptable(observed: Observed, wanted: TrainingJob, placement: Placement) -> bool:
    """Whether objects of an earlier TrainingJob of this name have to go first. Raises `KdistError`
    if the job cannot be made, or not be made like this.
    """
    name = observed.resource.key.name
    backend = backends.get(placement.backend)
    if wanted.spec.backend not in ("auto", placement.backend):
        hint = "delete the TrainingJob, which keeps the checkpoints, and apply it again"
        asked = f"spec.backend is {wanted.spec.backend}"
        raise backends.refuse_kind(name, placement.backend, asked, hint=hint)
    if wanted.spec.code is not None and wanted.spec.code.path is not None:
        raise KdistError(
            f"spec.code: {wanted.spec.code.path} is a folder, which does not travel with a "
            "TrainingJob",
            hint="put the code into the image, or into a ConfigMap and name it: "
            "code: {configMap: NAME}",
        )
    own = (ObjectKey("v1", "ConfigMap", name), ObjectKey(backend.api_version, backend.kind, name))
    names = {*list_children(wanted, placement, observed.resource.results), *own}
    rivals = {key: each for key, each in observed.rivals.items() if key in names}
    # objects of an earlier TrainingJob of this name are deleted with it
    leftover = [
        key
        for key, each in rivals.items()
        if any(
            (owner.get("kind"), owner.get("name")) == (KIND, name)
            for owner in documents.items(each, "metadata", "ownerReferences")
        )
    ]
    foreign = {key: each for key, each in rivals.items() if key not in leftover}
    if foreign:
        raise _refuse(observed, foreign)
    return bool(leftover)


def _refuse(observed: Observed, foreign: Mapping[ObjectKey, Document]) -> KdistError:
    """The error of objects that have the name of one of the job's, and are not its own."""
    name, namespace = observed.resource.key.name, observed.resource.key.namespace
    marked = [key for key, each in foreign.items() if find_owner(each, key.kind) == name]
    if len(marked) == len(foreign):
        objects = ", ".join(f"{key.kind} {key.name}" for key in marked)
        return KdistError(
            f"a job {name} without a TrainingJob is in namespace {namespace} already: {objects}",
            hint=f"`kdist delete {name} -n {namespace}` deletes it and this TrainingJob, and keeps "
            "the checkpoints: applied again, it continues from them",
        )
    errors = []
    for key, each in foreign.items():
        try:
            observed.owner.check(each, api_version=key.api_version, kind=key.kind)
        except ForeignError as error:
            errors.append(error)
    return ForeignError("; ".join(each.message for each in errors), hint=errors[0].hint)


class _Step(NamedTuple):
    actions: tuple[Action, ...] = ()
    stage: Stage = Stage.STEADY
    requeue_after: float | None = None
    poll_now: bool = False


def reconcile(observed: Observed) -> Changes:
    """Decide what has to be done for one TrainingJob."""
    if observed.resource.deleting:
        return Changes()
    try:
        wanted = observed.resource.read_job()
        placement = choose_placement(observed, wanted)
        waits = check_acceptable(observed, wanted, placement)
    except KdistError as error:
        changes = report(observed, Decision(refused=error), actions=())
        return replace(changes, requeue_after=_FOREIGN_SECONDS if observed.rivals else None)
    step = _decide(observed, wanted, placement, waits=waits)
    steady = step.stage in (Stage.STEADY, Stage.RESIZING)
    decision = Decision(
        wanted=wanted,
        placement=placement,
        stage=step.stage,
        restarted_at=None if observed.applied is None else observed.applied.spec.restarted_at,
        outdated=_find_outdated(observed, wanted) if steady else (),
        digests=_list_digests(observed, wanted, step.actions),
    )
    changes = report(observed, decision, actions=step.actions)
    notices, objection = changes.notices, observed.record.objection
    if objection and any(isinstance(each, RecordJob | ApplyObjects) for each in step.actions):
        name = observed.resource.key.name
        words = f"ConfigMap {name} is not followed, and written again from the spec: {objection}"
        version = documents.text(observed.config_map, "metadata", "resourceVersion")
        notices += (Notice("RecordReplaced", words, warning=True, occasion=version),)
    return replace(
        changes, notices=notices, requeue_after=step.requeue_after, poll_now=step.poll_now
    )


def _find_outdated(observed: Observed, wanted: TrainingJob) -> list[str]:
    """What needs new pods to take effect."""
    if observed.config_map is None or observed.applied is None:
        return []
    known = documents.texts(observed.resource.status, "appliedDigests")
    if known and known[-1] not in (
        observed.record.digest,
        digest_job(wanted, observed.resource.results),
    ):
        return ["spec: what its pods were made from is not known"]
    return find_differences(wanted, observed.applied, observed.backend)


def _list_digests(
    observed: Observed, wanted: TrainingJob, actions: Sequence[Action]
) -> tuple[str, ...]:
    """Digests of what the objects are made from: the last is that of the pods, or the next ones."""
    known = documents.texts(observed.resource.status, "appliedDigests")
    found = observed.record.digest
    if any(isinstance(each, ApplyObjects) and each.only is None for each in actions):
        before = known[-1:] or [found] * bool(found)
        return tuple(dict.fromkeys([*before, digest_job(wanted, observed.resource.results)]))
    if not known and found:
        return (found,)
    return tuple(known[-1:] if found in known[-1:] and not actions else known)


def _decide(observed: Observed, wanted: TrainingJob, placement: Placement, *, waits: bool) -> _Step:
    applied, workload = observed.applied, observed.workload
    restarts = [None, documents.text(observed.resource.status, "restartedAt")]
    if applied is not None:
        restarts.append(applied.spec.restarted_at or "")
    if wanted.spec.restarted_at not in restarts and (applied is not None or workload is not None):
        return _restart(observed, wanted, placement)
    if waits:
        return _Step(stage=Stage.CREATING, requeue_after=_POLL_SECONDS)
    if applied is None:
        return _create(observed, wanted, placement)
    if workload is None or observed.state is None:
        if is_terminal(observed.resource.status) or observed.result is not None:
            return _Step(tuple(DeleteObject(key) for key in observed.children if key.kind != CLAIM))
        if observed.alive or observed.leaving:
            return _Step()
        return _Step((_starting(wanted, placement),), Stage.CREATING)
    if observed.state.finished or _is_over(observed):
        return _finish(observed, wanted)
    for step in (
        _complete(observed, wanted, placement),
        _suspend(observed, wanted, applied, placement),
        _resize(observed, wanted, applied, placement),
        _correct_limits(observed, wanted, applied, placement),
    ):
        if step is not None:
            return step
    return _Step(() if _find_outdated(observed, wanted) else _prune(observed, wanted, placement))


def _starting(wanted: TrainingJob, placement: Placement) -> ApplyObjects:
    """Apply all objects of a job that has no workload. Kueue starts what is in its queues."""
    queued = wanted.spec.queue is not None and not backends.get(placement.backend).keeps_alive
    suspended = wanted.spec.suspend or queued
    return ApplyObjects(wanted, replace(placement, suspended=suspended), asked=wanted.spec.suspend)


def _create(observed: Observed, wanted: TrainingJob, placement: Placement) -> _Step:
    """Make the job's objects, or only its record, if somebody has deleted or changed that."""
    record = RecordJob(wanted, placement, wanted.spec.suspend, limits=wanted)
    if observed.workload is not None:
        resize = ResizeWorkload(wanted, _as_it_is(observed, placement))
        ended = observed.state is None or observed.state.finished or _is_over(observed)
        sized = can_scale(wanted, observed.backend) and not ended
        return _Step((resize, record) if sized else (record,))
    if is_terminal(observed.resource.status) or observed.result is not None:
        return _Step((record,))
    if observed.alive or observed.leaving:
        # of an earlier TrainingJob of this name, whose objects are still terminating
        return _Step(stage=Stage.CREATING, requeue_after=_POLL_SECONDS)
    return _Step((_starting(wanted, placement),), Stage.CREATING)


def _as_it_is(observed: Observed, placement: Placement) -> Placement:
    suspended = observed.state is not None and observed.state.suspended
    return replace(placement, suspended=suspended)


def _restart(observed: Observed, wanted: TrainingJob, placement: Placement) -> _Step:
    """One step of a restart: the pods save and end, the workload goes, all objects come again."""
    backend = backends.get(placement.backend)
    workload, state = observed.workload, observed.state
    if workload is None or state is None:
        if observed.alive or observed.leaving:
            return _Step(stage=Stage.RESTARTING)
        actions = (ForgetEnd(), _starting(wanted, placement))
        return _Step(actions, Stage.RESTARTING)
    if documents.text(workload, "metadata", "deletionTimestamp"):
        return _Step(stage=Stage.RESTARTING)
    if observed.alive and not (state.finished or _is_over(observed)):
        if state.suspended or observed.asked:
            return _Step(stage=Stage.RESTARTING)
        return _Step((_suspension(wanted, suspended=True),), Stage.RESTARTING)
    key = ObjectKey(backend.api_version, backend.kind, observed.resource.key.name)
    return _Step((DeleteObject(key, foreground=True),), Stage.RESTARTING)


def _finish(observed: Observed, wanted: TrainingJob) -> _Step:
    """What a job that has ended leaves to be done: a kind that cannot end by itself goes to zero
    pods, and after its TTL the workload goes.
    """
    status, backend = observed.status, observed.backend
    if backend is None or observed.state is None:
        return _Step()
    if not observed.state.finished:
        record = status.exit_record or ExitRecord(
            0 if status.phase.value == "Succeeded" else 1, outcome=status.phase.value.lower()
        )
        return _Step((RecordOutcome(record.to_text()),))
    ended = ended_at(observed)
    if ended is None or documents.text(observed.workload, "metadata", "deletionTimestamp"):
        return _Step()
    slack = _GRACE_SECONDS if backend.deletes_itself else 0.0
    left = ended + wanted.spec.ttl_seconds_after_finished + slack - observed.now
    if left > 0:
        return _Step(requeue_after=left)
    key = ObjectKey(backend.api_version, backend.kind, observed.resource.key.name)
    return _Step((DeleteObject(key),))


def _is_over(observed: Observed) -> bool:
    """Whether the training of a workload that cannot end by itself has ended."""
    backend = observed.backend
    status = observed.status
    return (
        backend is not None and backend.keeps_alive and status.kept_alive and status.phase.terminal
    )


def _complete(observed: Observed, wanted: TrainingJob, placement: Placement) -> _Step | None:
    """Make objects again that somebody has deleted."""
    expected = list_children(wanted, placement, observed.resource.results)
    missing = {key for key in expected if key not in observed.children}
    # A workload keeps the ConfigMap with `train.json` that it was made with, whatever name another
    # version of the controller gives it.
    name = observed.resource.key.name
    if any(key.name.startswith(f"{name}-train-") for key in observed.children):
        missing = {key for key in missing if not _is_settings(key, wanted)}
    if not missing:
        return None
    return _Step((ApplyObjects(wanted, placement, only=frozenset(missing)),))


def _prune(
    observed: Observed, wanted: TrainingJob, placement: Placement
) -> tuple[DeleteObject, ...]:
    """Delete the objects that the job has no longer; never a claim."""
    expected = list_children(wanted, placement, observed.resource.results)
    mounted = any(_is_settings(key, wanted) for key in expected if key in observed.children)
    return tuple(
        DeleteObject(key)
        for key in observed.children
        if key not in expected and key.kind != CLAIM and (mounted or not _is_settings(key, wanted))
    )


def _is_settings(key: ObjectKey, job: TrainingJob) -> bool:
    return key.kind == "ConfigMap" and key.name.startswith(f"{job.metadata.name}-train-")


def _suspension(job: TrainingJob, *, suspended: bool) -> SuspendWorkload:
    return SuspendWorkload(suspended, job.spec.nodes.max, queued=job.spec.queue is not None)


def _suspend(
    observed: Observed, wanted: TrainingJob, applied: TrainingJob, placement: Placement
) -> _Step | None:
    """Suspend or resume. The workload first, so that what is recorded has been done."""
    want, state = wanted.spec.suspend, observed.state
    if state is None:
        return None
    record = _keep(observed, wanted, applied, placement)
    differs = want != (observed.asked if wanted.spec.queue is not None else state.suspended)
    if not differs:
        return None if want == observed.asked else _Step((record,))
    pods_stay = observed.backend is not None and observed.backend.keeps_alive
    if not want and pods_stay and not documents.is_renewed(observed.workload):
        return _Step()
    return _Step((_suspension(wanted, suspended=want), record))


def _resize(
    observed: Observed, wanted: TrainingJob, applied: TrainingJob, placement: Placement
) -> _Step | None:
    """Change the number of nodes: the agents learn it before the number of pods changes."""
    nodes = wanted.spec.nodes
    if nodes == applied.spec.nodes or not can_resize(wanted, applied, observed.backend):
        return None
    asked, text = wanted.spec.suspend, observed.record.text
    if _read_limits(observed.config_map) != (nodes.min, nodes.max):
        limits = RecordJob(wanted, placement, asked, limits=wanted, text=text)
        return _Step((limits,), Stage.RESIZING)
    working = [pod.name for pod in observed.alive if pod.working]
    annotation = f"{nodes.min}:{nodes.max}"
    unaware = tuple(
        name
        for pod in observed.pods
        if (name := documents.name(pod)) in working
        and documents.annotation(pod, NODES_ANNOTATION) != annotation
    )
    if unaware:
        action = AnnounceLimits(unaware, nodes.min, nodes.max)
        return _Step((action,), Stage.RESIZING, requeue_after=_POLL_SECONDS, poll_now=True)
    known = [documents.mapping(observed.reports.get(pod), "nodes") for pod in working]
    if any(each and (each.get("min"), each.get("max")) != (nodes.min, nodes.max) for each in known):
        return _Step(stage=Stage.RESIZING, requeue_after=_POLL_SECONDS, poll_now=True)
    resize = ResizeWorkload(wanted, _as_it_is(observed, placement))
    text = observed.record.with_nodes(wanted)
    record = RecordJob(wanted, placement, asked, limits=wanted, text=text)
    return _Step((resize, record), Stage.RESIZING)


def _keep(
    observed: Observed, wanted: TrainingJob, applied: TrainingJob, placement: Placement
) -> RecordJob:
    """Record the same job and limits as before, and what is asked for now."""
    spec = wanted.spec.model_copy(update={"nodes": applied.spec.nodes})
    limits = wanted.model_copy(update={"spec": spec})
    text = observed.record.text
    return RecordJob(wanted, placement, wanted.spec.suspend, limits=limits, text=text)


def _correct_limits(
    observed: Observed, wanted: TrainingJob, applied: TrainingJob, placement: Placement
) -> _Step | None:
    """Write the limits again that the agents read, if somebody else has changed them."""
    nodes = applied.spec.nodes
    if _read_limits(observed.config_map) == (nodes.min, nodes.max):
        return None
    return _Step((_keep(observed, wanted, applied, placement),))


def _read_limits(config_map: Document | None) -> tuple[int | None, int | None]:
    """The limits on the number of nodes that the agents read."""
    found = documents.parse(documents.text(config_map, "data", "nodes.json"))
    return documents.integer(found, "min"), documents.integer(found, "max")

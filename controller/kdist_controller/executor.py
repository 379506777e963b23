"""Executes what `reconcile` has decided: writes events and the status, and applies, changes and
deletes objects. Objects are applied under the field manager of the controller, with the TrainingJob
as their owner; what is changed or deleted is identified by the uid that was observed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from kdist import deploy
from kdist.backends import RUNTIME, Placement
from kdist.cluster import ApiError, Cluster, JobObjects
from kdist.diagnose import KEY_MISSING
from kdist.errors import NotFoundError
from kdist.job.cluster import suspend
from kdist.job.cluster.applied import AppliedJob
from kdist.manifest import NODES_ANNOTATION, Manifest, ObjectKey
from kdist.spec import API_VERSION, KIND
from kdist.status import ASKED, OUTCOME, documents
from kdist_controller import status
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
from kdist_controller.cache import Cache, trim
from kdist_controller.observation import Observed
from kdist_controller.resource import Resource, find_sized, render_objects, render_own

COMPONENT: Final = "kdist-controller"

FIELD_MANAGER: Final = COMPONENT

Document = dict[str, Any]


def write_event(cluster: Cluster, resource: Resource, notice: Notice, *, identity: str) -> None:
    """Create an event of the TrainingJob. Its name follows from `identity`, which tells this
    occasion from others with the same reason, so that one written twice is one.
    """
    key = resource.key
    whole = "\0".join((resource.uid, identity, notice.reason))
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    now = status.format_time(time.time())
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{key.name}.{digest}", "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": key.name,
            "namespace": key.namespace,
            "uid": resource.uid,
            "resourceVersion": documents.text(resource.document, "metadata", "resourceVersion"),
        },
        "reason": notice.reason,
        "message": notice.message,
        "type": "Warning" if notice.warning else "Normal",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }
    try:
        cluster.send_create(event)
    except ApiError as error:
        if error.status != HTTPStatus.CONFLICT:
            raise


def make_target(cluster: Cluster, observed: Observed) -> AppliedJob:
    """The job as `kdist.recovery` and `kdist.job.cluster` take it: by the TrainingJob's spec, or,
    where that is not valid, by what its pods are made from. Raises `NotFoundError` if neither is
    known.
    """
    job, backend = observed.wanted or observed.applied, observed.backend
    status = observed.resource.status
    if job is None or backend is None:
        raise NotFoundError(f"what {observed.resource.key} runs is not known")
    placement = Placement(
        backend.name,
        "c10d" if documents.text(status, "rendezvous") == "c10d" else "kubernetes",
        documents.text(status, "runId"),
    )
    return AppliedJob(cluster, observed.config_map or {}, job, backend, placement)


class Executor:
    """Changes the objects of one job, as it was observed, and puts the API server's answers into
    the cache.
    """

    def __init__(self, cluster: Cluster, cache: Cache, observed: Observed) -> None:
        self._cluster = cluster.within(observed.resource.key.namespace)
        self._cache = cache
        self._observed = observed
        self._resource = observed.resource
        self._objects = JobObjects(self._cluster, observed.owner)

    def execute(self, changes: Changes) -> None:
        """Execute changes in their order: events, status, actions. Raises `KdistError` at the
        first that fails; what is left is decided again.
        """
        document = self._resource.document
        for notice in changes.notices:
            version = documents.text(document, "metadata", "resourceVersion")
            write_event(self._cluster, self._resource, notice, identity=notice.occasion or version)
        if (status := changes.status) is not None:
            body = {"status": _merge_patch(self._resource.status, status)}
            kind = (API_VERSION, KIND, self._resource.key.name)
            found = self._objects.change(*kind, body, known=document, subresource="status")
            self._cache.put(trim({**found, "apiVersion": API_VERSION, "kind": KIND}))
        for action in changes.actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        match action:
            case ApplyObjects():
                self._apply_objects(action)
            case RecordJob():
                manifest = render_own(action.job, action.placement)
                data = dict(manifest.document["data"])
                if action.limits is not action.job:
                    limits = render_own(action.limits, action.placement)
                    data["nodes.json"] = limits.document["data"]["nodes.json"]
                if action.text:
                    data["job.json"] = action.text
                manifest = Manifest({**manifest.document, "data": data})
                self._apply_own(manifest, asked=action.asked)
            case ResizeWorkload():
                self._resize(action)
            case AnnounceLimits():
                shown = {NODES_ANNOTATION: f"{action.least}:{action.most}"}
                body = {"metadata": {"annotations": shown}}
                for pod in action.pods:
                    self._cache.put(trim(self._objects.change("v1", "Pod", pod, body)))
            case SuspendWorkload():
                self._suspend(action)
            case RecordOutcome():
                annotations = {"annotations": {OUTCOME: action.record}}
                self._patch_workload({"metadata": annotations, "spec": {"replicas": 0}})
            case DeleteObject():
                found = self._observed.children.get(action.key) or self._observed.workload
                if found is not None:
                    uid = documents.uid(found)
                    propagation = "Foreground" if action.foreground else "Background"
                    self._objects.remove(*action.key, propagation=propagation, uid=uid)
            case ForgetEnd():
                deploy.forget_end(self._cluster, self._observed.owner)
                deploy.request_start(self._cluster, self._observed.owner, self._observed.applied)

    def _apply_objects(self, action: ApplyObjects) -> None:
        name = self._resource.key.name
        if action.only is None:
            # nothing is sent if an object that is not the job's has the name of one of these
            known = self._cache.read(self._resource.key).copies
            for each in render_objects(action.job, action.placement):
                if ObjectKey(each.api_version, each.kind, each.name) in known:
                    continue
                if (found := self._cluster.find(each)) is not None:
                    self._observed.owner.check(found, api_version=each.api_version, kind=each.kind)
            owner = self._resource.owner_reference
            problem = deploy.create_key(self._objects, action.job, action.placement, owner)
            if problem:  # the agents' exchange has to do without a key
                notice = Notice(KEY_MISSING, problem, warning=True)
                write_event(self._cluster, self._resource, notice, identity=action.placement.run_id)
        for manifest in render_objects(action.job, action.placement):
            key = ObjectKey(manifest.api_version, manifest.kind, manifest.name)
            if action.only is not None and key not in action.only:
                continue
            if (manifest.kind, manifest.name) == ("ConfigMap", name):
                self._apply_own(manifest, asked=action.asked)
            elif manifest.kind == RUNTIME:
                try:
                    self._apply(manifest)
                except ApiError as error:
                    # Most fields of a TrainingRuntime are immutable: where the TrainJob has yet to
                    # be created, it is created again.
                    if "immutable" not in str(error) or self._observed.workload is not None:
                        raise
                    self._objects.remove(manifest.api_version, manifest.kind, manifest.name)
                    self._apply(manifest)
            else:
                self._apply(manifest)

    def _apply_own(self, manifest: Manifest, *, asked: bool) -> None:
        if asked:
            metadata = manifest.document["metadata"]
            annotations = {**metadata["annotations"], ASKED: "suspended"}
            metadata = {**metadata, "annotations": annotations}
            manifest = Manifest({**manifest.document, "metadata": metadata})
        found = self._apply(manifest)
        self._cache.put_own(self._resource.key, trim_own(found))

    def _apply(self, manifest: Manifest) -> Document:
        metadata = dict(manifest.document["metadata"])
        if not manifest.stays:
            metadata["ownerReferences"] = [self._resource.owner_reference]
        owned = replace(manifest, document={**manifest.document, "metadata": metadata})
        key = ObjectKey(manifest.api_version, manifest.kind, manifest.name)
        known = self._cache.read(self._resource.key).copies.get(key)
        found = self._objects.apply(owned, known=known, force=True).document
        self._cache.put(trim(found))
        return found

    def _resize(self, action: ResizeWorkload) -> None:
        """Change what follows from the number of nodes. The rest of the workload stays what it was
        made with: it may be older than the spec.
        """
        workload, sized = find_sized(action.job, action.placement)
        kind = (workload.api_version, workload.kind, workload.name)
        found = self._objects.change(*kind, {"spec": sized})
        self._cache.put(trim(found))
        for manifest in render_objects(action.job, action.placement):
            if manifest.kind == "PodDisruptionBudget":
                self._apply(manifest)

    def _suspend(self, action: SuspendWorkload) -> None:
        if not action.suspended:
            deploy.request_start(self._cluster, self._observed.owner, self._observed.applied)
        if action.queued:
            job = make_target(self._cluster, self._observed)
            suspend.set_active(job, active=not action.suspended)
        elif self._observed.backend is not None:
            body = self._observed.backend.suspend_patch(action.suspended, nodes=action.nodes)
            self._patch_workload(body)

    def _patch_workload(self, body: Document) -> None:
        if self._observed.backend is not None:
            kind = (self._observed.backend.api_version, self._observed.backend.kind)
            found = self._objects.change(*kind, self._resource.key.name, body)
            self._cache.put(trim(found))


def _merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Document:
    """What replaces one status with another: null removes a field."""
    found: Document = dict.fromkeys(before)
    for key, value in after.items():
        inner = documents.mapping(before, key)
        found[key] = _merge_patch(inner, value) if isinstance(value, Mapping) else value
    return found


def trim_own(document: Mapping[str, Any]) -> Document:
    """The job's own ConfigMap with its data, and the metadata that decisions need."""
    return {**trim(dict(document)), "data": document.get("data") or {}}

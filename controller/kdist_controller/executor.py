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

from kdist import backends, deploy
from kdist.backends import RUNTIME
from kdist.cluster import ApiError, Cluster, JobObjects
from kdist.diagnose import KEY_MISSING
from kdist.job.cluster import suspend
from kdist.job.cluster.applied import AppliedJob
from kdist.manifest import NODES_ANNOTATION, RECLAIM_POLICY, Manifest, ObjectKey
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
    """Create an event. Its name follows from `identity`, so that one written twice is one.

    Args:
        cluster: the cluster, with the namespace of the TrainingJob.
        resource: the TrainingJob.
        notice: what it says.
        identity: what distinguishes this occasion from others with the same reason.
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


class Executor:
    """Executes changes, and puts the API server's answers into the cache."""

    def __init__(self, cluster: Cluster, cache: Cache) -> None:
        self._cluster = cluster
        self._cache = cache

    def execute(self, observed: Observed, changes: Changes) -> None:
        """Execute changes in their order: events, status, actions. Raises `KdistError` at the
        first that fails; what is left is decided again.
        """
        cluster = self._cluster.within(observed.resource.key.namespace)
        for notice in changes.notices:
            version = documents.text(observed.resource.document, "metadata", "resourceVersion")
            write_event(cluster, observed.resource, notice, identity=notice.occasion or version)
        job = _JobExecutor(cluster, self._cache, observed)
        if changes.status is not None:
            job.write_status(changes.status)
        for action in changes.actions:
            job.execute(action)


class _JobExecutor:
    """Changes the objects of one job, as it was observed."""

    def __init__(self, cluster: Cluster, cache: Cache, observed: Observed) -> None:
        self._cluster = cluster
        self._cache = cache
        self._observed = observed
        self._resource = observed.resource
        self._objects = JobObjects(cluster, observed.owner)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Write the whole status."""
        before = self._resource.document
        removed = dict.fromkeys(key for key in self._resource.status if key not in status)
        body = {"status": {**status, **removed}}
        name = self._resource.key.name
        found = self._objects.change(
            API_VERSION, KIND, name, body, known=before, subresource="status"
        )
        self._cache.put(trim({**found, "apiVersion": API_VERSION, "kind": KIND}))

    def execute(self, action: Action) -> None:
        """Execute one action."""
        match action:
            case ApplyObjects():
                self._apply_objects(action)
            case RecordJob():
                self._record_job(action)
            case ResizeWorkload():
                self._resize(action)
            case AnnounceLimits():
                self._announce(action)
            case SuspendWorkload():
                self._suspend(action)
            case RecordOutcome():
                annotations = {"annotations": {OUTCOME: action.record}}
                body = {"metadata": annotations, "spec": {"replicas": 0}}
                self._patch_workload(body)
            case DeleteObject():
                self._delete(action)
            case ForgetEnd():
                deploy.forget_end(self._cluster, self._observed.owner)
                deploy.request_start(self._cluster, self._observed.owner, self._observed.applied)

    def _apply_objects(self, action: ApplyObjects) -> None:
        name = self._resource.key.name
        kind = backends.get(action.placement.backend).kind
        if action.only == "all":
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
            own = (manifest.kind, manifest.name)
            if action.only == "missing":
                key = ObjectKey(manifest.api_version, manifest.kind, manifest.name)
                if own in ((kind, name), ("ConfigMap", name)) or key in self._observed.children:
                    continue
            if own == ("ConfigMap", name):
                self._apply_own(manifest, asked=action.asked)
            elif manifest.kind == RUNTIME:
                self._apply_runtime(manifest)
            else:
                self._apply(manifest)

    def _apply_runtime(self, manifest: Manifest) -> None:
        """Apply the TrainingRuntime of a TrainJob that is about to be created. Most of its fields
        are immutable: if they differ from those of the last TrainJob, it is created again.
        """
        try:
            self._apply(manifest)
        except ApiError as error:
            if "immutable" not in str(error) or self._observed.workload is not None:
                raise
            self._objects.remove(manifest.api_version, manifest.kind, manifest.name)
            self._apply(manifest)

    def _record_job(self, action: RecordJob) -> None:
        manifest = render_own(action.job, action.placement)
        data = dict(manifest.document["data"])
        if action.limits is not action.job:
            limits = render_own(action.limits, action.placement)
            data["nodes.json"] = limits.document["data"]["nodes.json"]
        if action.text:
            data["job.json"] = action.text
        manifest = Manifest({**manifest.document, "data": data})
        self._apply_own(manifest, asked=action.asked)

    def _apply_own(self, manifest: Manifest, *, asked: bool) -> None:
        """Apply the job's own ConfigMap."""
        if asked:
            metadata = manifest.document["metadata"]
            annotations = {**metadata["annotations"], ASKED: "suspended"}
            metadata = {**metadata, "annotations": annotations}
            manifest = Manifest({**manifest.document, "metadata": metadata})
        found = self._apply(manifest)
        self._cache.put_own(self._resource.key, trim_own(found))

    def _apply(self, manifest: Manifest) -> Document:
        metadata = dict(manifest.document["metadata"])
        kept = manifest.kind == "PersistentVolumeClaim"
        if not kept or (metadata.get("annotations") or {}).get(RECLAIM_POLICY) == "Delete":
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

    def _announce(self, action: AnnounceLimits) -> None:
        body = {"metadata": {"annotations": {NODES_ANNOTATION: f"{action.least}:{action.most}"}}}
        for pod in action.pods:
            self._cache.put(trim(self._objects.change("v1", "Pod", pod, body)))

    def _suspend(self, action: SuspendWorkload) -> None:
        if not action.suspended:
            deploy.request_start(self._cluster, self._observed.owner, self._observed.applied)
        if action.queued:
            job = AppliedJob.find(self._cluster, self._resource.key.name)
            suspend.set_active(job, active=not action.suspended)
        elif self._observed.backend is not None:
            body = self._observed.backend.suspend_patch(action.suspended, nodes=action.nodes)
            self._patch_workload(body)

    def _patch_workload(self, body: Document) -> None:
        if self._observed.backend is not None:
            kind = (self._observed.backend.api_version, self._observed.backend.kind)
            found = self._objects.change(*kind, self._resource.key.name, body)
            self._cache.put(trim(found))

    def _delete(self, action: DeleteObject) -> None:
        key = action.key
        found = self._observed.children.get(key) or self._observed.workload
        if found is None:
            return
        uid = documents.text(found, "metadata", "uid")
        propagation = "Foreground" if action.foreground else "Background"
        self._objects.remove(*key, propagation=propagation, uid=uid)


def trim_own(document: Mapping[str, Any]) -> Document:
    """The job's own ConfigMap with its data, and the metadata that decisions need."""
    return {**trim(dict(document)), "data": document.get("data") or {}}

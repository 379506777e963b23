"""Executes what `reconcile` has decided: writes events and the status, and applies, changes and
deletes objects. Objects are applied under the field manager of the controller, with the TrainingJob
as their owner; what is changed or deleted is identified by the uid that was observed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from kdist import backends, deploy
from kdist.backends import RUNTIME
from kdist.cluster import ApiError, Cluster, JobObjects
from kdist.diagnose import KEY_MISSING
from kdist.job.cluster import suspend
from kdist.job.cluster.job import ClusterJob
from kdist.manifest import RECLAIM_POLICY, Manifest
from kdist.ownership import ObjectKey
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

COMPONENT = "kdist-controller"


def tell(cluster: Cluster, resource: Resource, notice: Notice, *, identity: str) -> None:
    """Create an event. Its name follows from `identity`, so that one told twice is one.

    Args:
        cluster: the cluster, with the namespace of the TrainingJob.
        resource: the TrainingJob.
        notice: what to tell.
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


FIELD_MANAGER: Final = COMPONENT

Document = dict[str, Any]


class Executor:
    """Carries out changes, and puts the API server's answers into the cache."""

    def __init__(self, cluster: Cluster, cache: Cache) -> None:
        self._cluster = cluster
        self._cache = cache

    def carry_out(self, observed: Observed, changes: Changes) -> None:
        """Carry out changes in their order: events, status, actions. Raises `KdistError` at the
        first that fails; what is left is decided again.
        """
        cluster = self._cluster.within(observed.resource.key.namespace)
        for notice in changes.notices:
            version = documents.text(observed.resource.document, "metadata", "resourceVersion")
            tell(cluster, observed.resource, notice, identity=notice.occasion or version)
        if changes.status is not None:
            self._write_status(cluster, observed, changes.status)
        for action in changes.actions:
            self._handler(action)(cluster, observed)

    def _handler(self, action: Action) -> Callable[[Cluster, Observed], None]:
        match action:
            case ApplyObjects():
                return partial(self._apply_objects, action)
            case RecordJob():
                return partial(self._record_job, action)
            case ResizeWorkload():
                return partial(self._resize, action)
            case AnnounceLimits():
                return partial(self._announce, action)
            case SuspendWorkload():
                return partial(self._suspend, action)
            case RecordOutcome():
                return partial(self._record_outcome, action)
            case DeleteObject():
                return partial(self._delete, action)
            case ForgetEnd():
                return self._forget_end

    def _forget_end(self, cluster: Cluster, observed: Observed) -> None:
        deploy.forget_end(cluster, observed.owner)
        deploy.request_start(cluster, observed.owner, observed.applied)

    def _write_status(
        self, cluster: Cluster, observed: Observed, status: Mapping[str, Any]
    ) -> None:
        before = observed.resource.document
        removed = dict.fromkeys(key for key in observed.resource.status if key not in status)
        body = {"status": {**status, **removed}}
        name = observed.resource.key.name
        found = _objects(cluster, observed).change(
            API_VERSION, KIND, name, body, known=before, subresource="status"
        )
        self._cache.put(trim({**found, "apiVersion": API_VERSION, "kind": KIND}))

    def _apply_objects(self, action: ApplyObjects, cluster: Cluster, observed: Observed) -> None:
        name = observed.resource.key.name
        kind = backends.get(action.placement.backend).kind
        if action.only == "all":
            self._check_free(action, cluster, observed)
            self._create_key(action, cluster, observed)
        for manifest in render_objects(action.job, action.placement):
            own = (manifest.kind, manifest.name)
            if action.only == "missing":
                key = ObjectKey(manifest.api_version, manifest.kind, manifest.name)
                if own in ((kind, name), ("ConfigMap", name)) or key in observed.children:
                    continue
            if own == ("ConfigMap", name):
                self._apply_own(cluster, observed, manifest, asked=action.asked)
            elif manifest.kind == RUNTIME:
                self._apply_runtime(cluster, observed, manifest)
            else:
                self._apply(cluster, observed, manifest)

    def _check_free(self, action: ApplyObjects, cluster: Cluster, observed: Observed) -> None:
        """Raise `ForeignError` before anything is sent, if an object that is not the job's has the
        name of one that is about to be made.
        """
        known = self._cache.read(observed.resource.key).objects
        for each in render_objects(action.job, action.placement):
            if ObjectKey(each.api_version, each.kind, each.name) in known:
                continue
            if (found := cluster.find(each)) is not None:
                observed.owner.check(found, api_version=each.api_version, kind=each.kind)

    def _create_key(self, action: ApplyObjects, cluster: Cluster, observed: Observed) -> None:
        """Create the key of the job's exchange, or say that the job has to do without."""
        resource = observed.resource
        owner = resource.owner_reference
        objects = _objects(cluster, observed)
        problem = deploy.create_key(objects, action.job, action.placement, owner)
        if problem:
            notice = Notice(KEY_MISSING, problem, warning=True)
            tell(cluster, resource, notice, identity=action.placement.run_id)

    def _apply_runtime(self, cluster: Cluster, observed: Observed, manifest: Manifest) -> None:
        """Apply the TrainingRuntime of a TrainJob that is about to be created. Most of its fields
        are immutable: if they differ from those of the last TrainJob, it is created again.
        """
        try:
            self._apply(cluster, observed, manifest)
        except ApiError as error:
            if "immutable" not in str(error) or observed.workload is not None:
                raise
            _objects(cluster, observed).remove(manifest.api_version, manifest.kind, manifest.name)
            self._apply(cluster, observed, manifest)

    def _record_job(self, action: RecordJob, cluster: Cluster, observed: Observed) -> None:
        manifest = render_own(action.job, action.placement)
        data = dict(manifest.document["data"])
        if action.limits is not action.job:
            limits = render_own(action.limits, action.placement)
            data["nodes.json"] = limits.document["data"]["nodes.json"]
        if action.text:
            data["job.json"] = action.text
        manifest = Manifest({**manifest.document, "data": data})
        self._apply_own(cluster, observed, manifest, asked=action.asked)

    def _apply_own(
        self, cluster: Cluster, observed: Observed, manifest: Manifest, *, asked: bool
    ) -> None:
        """Apply the job's own ConfigMap."""
        if asked:
            metadata = manifest.document["metadata"]
            annotations = {**metadata["annotations"], ASKED: "suspended"}
            metadata = {**metadata, "annotations": annotations}
            manifest = Manifest({**manifest.document, "metadata": metadata})
        found = self._apply(cluster, observed, manifest)
        self._cache.put_own(observed.resource.key, strip(found))

    def _apply(self, cluster: Cluster, observed: Observed, manifest: Manifest) -> Document:
        metadata = dict(manifest.document["metadata"])
        kept = manifest.kind == "PersistentVolumeClaim"
        if not kept or (metadata.get("annotations") or {}).get(RECLAIM_POLICY) == "Delete":
            metadata["ownerReferences"] = [observed.resource.owner_reference]
        owned = replace(manifest, document={**manifest.document, "metadata": metadata})
        key = ObjectKey(manifest.api_version, manifest.kind, manifest.name)
        known = self._cache.read(observed.resource.key).objects.get(key)
        found = _objects(cluster, observed).apply(owned, known=known, force=True).document
        self._cache.put(trim(found))
        return found

    def _resize(self, action: ResizeWorkload, cluster: Cluster, observed: Observed) -> None:
        """Change what follows from the number of nodes. The rest of the workload stays what it was
        made with: it may be older than the spec.
        """
        workload, sized = find_sized(action.job, action.placement)
        kind = (workload.api_version, workload.kind, workload.name)
        found = _objects(cluster, observed).change(*kind, {"spec": sized})
        self._cache.put(trim(found))
        for manifest in render_objects(action.job, action.placement):
            if manifest.kind == "PodDisruptionBudget":
                self._apply(cluster, observed, manifest)

    def _announce(self, action: AnnounceLimits, cluster: Cluster, observed: Observed) -> None:
        body = {"metadata": {"annotations": {"kdist.dev/nodes": f"{action.least}:{action.most}"}}}
        objects = _objects(cluster, observed)
        for pod in action.pods:
            self._cache.put(trim(objects.change("v1", "Pod", pod, body)))

    def _suspend(self, action: SuspendWorkload, cluster: Cluster, observed: Observed) -> None:
        if not action.suspended:
            deploy.request_start(cluster, observed.owner, observed.applied)
        if action.queued:
            suspend.set_active(_find_job(cluster, observed), active=not action.suspended)
        elif observed.backend is not None:
            body = observed.backend.suspend_patch(action.suspended, nodes=action.nodes)
            self._patch_workload(cluster, observed, body)

    def _record_outcome(self, action: RecordOutcome, cluster: Cluster, observed: Observed) -> None:
        body = {"metadata": {"annotations": {OUTCOME: action.record}}, "spec": {"replicas": 0}}
        self._patch_workload(cluster, observed, body)

    def _patch_workload(self, cluster: Cluster, observed: Observed, body: Document) -> None:
        if observed.backend is not None:
            kind = (observed.backend.api_version, observed.backend.kind)
            found = _objects(cluster, observed).change(*kind, observed.resource.key.name, body)
            self._cache.put(trim(found))

    def _delete(self, action: DeleteObject, cluster: Cluster, observed: Observed) -> None:
        key = action.key
        found = observed.children.get(key) or observed.workload
        if found is None:
            return
        uid = documents.text(found, "metadata", "uid")
        propagation = "Foreground" if action.foreground else "Background"
        _objects(cluster, observed).remove(*key, propagation=propagation, uid=uid)


def _objects(cluster: Cluster, observed: Observed) -> JobObjects:
    """What changes the objects of a TrainingJob."""
    return JobObjects(cluster, observed.owner)


def strip(document: Mapping[str, Any]) -> Document:
    """The job's own ConfigMap with its data, and the metadata that decisions need."""
    return {**trim(dict(document)), "data": document.get("data") or {}}


def _find_job(cluster: Cluster, observed: Observed) -> ClusterJob:
    """The job as the operations of `kdist.job.cluster` take it."""
    return ClusterJob.find(cluster, observed.resource.key.name)

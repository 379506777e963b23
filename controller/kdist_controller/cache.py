"""Copies of the objects of all TrainingJobs, kept up to date by watches: `Informer` lists and
watches one kind of objects, `Cache` keeps the trimmed copies by job, and `sort_objects` tells which
of them a TrainingJob owns: a label selects, ownership decides.

Whoever changes an object puts the API server's answer into the cache, so that no decision is made
on an older state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, Protocol

from kdist import backends
from kdist.backends import Backend, is_made_for
from kdist.cluster import ApiError, Cluster
from kdist.errors import KdistError
from kdist.manifest import JOB_LABEL
from kdist.ownership import ObjectKey
from kdist.spec import KIND
from kdist.status import documents
from kdist.threads import OnError, start_thread
from kdist_controller.resource import MAX_VALUES, OVERSIZED, JobKey, Resource, Results

Document = dict[str, Any]

_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "annotations",
    "ownerReferences",
)
_WORKLOAD_SPEC: Final = ("suspend", "replicas", "runPolicy", "schedulingPolicy")
_POD_SPEC: Final = ("nodeName", "readinessGates", "terminationGracePeriodSeconds")
_POD_STATUS: Final = (
    "phase",
    "reason",
    "message",
    "podIP",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
)
_CONTAINER_STATUS: Final = ("name", "state", "lastState", "ready", "restartCount")
_INIT_CONTAINER: Final = ("name", "args", "restartPolicy")  # the arguments say what it fetches
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def trim(document: Document) -> Document:
    """An object without what no decision needs."""
    metadata = document.get("metadata") or {}
    kept = {key: metadata[key] for key in _METADATA if metadata.get(key)}
    if _LAST_APPLIED in (kept.get("annotations") or {}):
        kept["annotations"] = {
            key: value for key, value in kept["annotations"].items() if key != _LAST_APPLIED
        }
    found = {
        "apiVersion": document.get("apiVersion"),
        "kind": document.get("kind"),
        "metadata": kept,
    }
    if found["kind"] == KIND:
        return {**found, **_bound(document), "status": document.get("status") or {}}
    if found["kind"] == "Pod":
        return {**found, **_trim_pod(document)}
    if found["kind"] in _WORKLOAD_KINDS:
        spec = _choose(document.get("spec"), _WORKLOAD_SPEC)
        return {**found, "spec": spec, "status": document.get("status") or {}}
    return found


def _bound(resource: Document) -> Document:
    """The spec of a TrainingJob. One with more values than a job has is left out, so that a few
    TrainingJobs do not use up the controller's memory.
    """
    spec = resource.get("spec")
    values, waiting = 0, [spec]
    while waiting:
        each = waiting.pop()
        nested = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting.extend(nested)
        values += 1
        if values + len(waiting) > MAX_VALUES:
            return {"spec": {}, OVERSIZED: True}
    return {"spec": spec}


_WORKLOAD_KINDS: Final = frozenset(backends.get(name).kind for name in backends.NAMES)


def _trim_pod(pod: Document) -> Document:
    spec, status = pod.get("spec") or {}, _choose(pod.get("status"), _POD_STATUS)
    for name in ("containerStatuses", "initContainerStatuses"):
        if name in status:
            status[name] = [_choose(each, _CONTAINER_STATUS) for each in status[name]]
    found = {**_choose(spec, _POD_SPEC), "containers": _names(spec.get("containers"))}
    if spec.get("initContainers"):
        found["initContainers"] = [
            _choose(each, _INIT_CONTAINER) for each in spec["initContainers"]
        ]
    return {"spec": found, "status": status}


def _names(containers: Any) -> list[Document]:
    return [{"name": each.get("name")} for each in containers or []]


def _choose(document: Any, keys: Iterable[str]) -> Document:
    found = document if isinstance(document, Mapping) else {}
    return {key: found[key] for key in keys if key in found}


@dataclass
class JobObjects:
    """The objects of one job.

    Attributes:
        resource: the TrainingJob; None if there is none.
        own: all of the job's own ConfigMap, as it was fetched last.
        objects: its workload and its other objects.
        pods: its pods, by name.
        results: the latest results of functions of the TrainingJob.
    """

    resource: Document | None = None
    own: Document | None = None
    objects: dict[ObjectKey, Document] = field(default_factory=dict)
    pods: dict[str, Document] = field(default_factory=dict)
    results: Results = field(default_factory=Results)


class Cache:
    """The objects of all jobs. Threads may share it."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, JobObjects] = {}
        self._lock = threading.Lock()

    def put(self, document: Document) -> set[JobKey]:
        """Keep an object, already trimmed.

        Returns:
            Its job, if the object is new to the cache; nothing for an older version of it, and for
            what belongs to no job.
        """
        key = _find_job(document)
        if key is None:
            return set()
        with self._lock:
            job = self._jobs.setdefault(key, JobObjects())
            if not _is_newer(document, _read(job, document)):
                return set()
            _write(job, document)
        return {key}

    def put_own(self, key: JobKey, document: Document) -> None:
        """Keep all of a job's own ConfigMap."""
        with self._lock:
            job = self._jobs.setdefault(key, JobObjects())
            if _is_newer(document, job.own) or job.own is None:
                job.own = document
            known = trim(document)
            if _is_newer(known, _read(job, known)):
                _write(job, known)

    def drop(self, document: Document) -> set[JobKey]:
        """Forget a deleted object; returns its job, if the object was known."""
        key = _find_job(document)
        if key is None:
            return set()
        with self._lock:
            job = self._jobs.get(key)
            found = None if job is None else _read(job, document)
            if job is None or found is None or _uid(found) != _uid(document):
                return set()
            _remove(job, document)
            if job.resource is None and not job.objects and not job.pods:
                del self._jobs[key]
        return {key}

    def replace(self, kind: str, namespace: str | None, listed: Iterable[Document]) -> set[JobKey]:
        """Keep these objects as all that there are of a kind.

        Args:
            kind: of the objects.
            namespace: of the objects; None for all namespaces.
            listed: the objects, already trimmed.

        Returns:
            The jobs of which an object has changed or gone.
        """
        present = {_uid(each): each for each in listed}
        changed = [self.put(each) for each in present.values()]
        with self._lock:
            gone = [
                each
                for key, job in self._jobs.items()
                if namespace in (None, key.namespace)
                for each in _list(job, kind)
                if _uid(each) not in present
            ]
        return set().union(*changed, *map(self.drop, gone))

    def read(self, key: JobKey) -> JobObjects:
        """The objects of a job, as they are now."""
        with self._lock:
            job = self._jobs.get(key) or JobObjects()
            return replace(job, objects=dict(job.objects), pods=dict(job.pods))

    def find_jobs_on(self, node: str) -> set[JobKey]:
        """The jobs with a pod on this node."""
        with self._lock:
            return {
                key
                for key, job in self._jobs.items()
                if any(documents.text(pod, "spec", "nodeName") == node for pod in job.pods.values())
            }

    def list_jobs(self) -> list[tuple[JobKey, Document]]:
        """Every TrainingJob."""
        with self._lock:
            return [(key, job.resource) for key, job in self._jobs.items() if job.resource]


def _find_job(document: Document) -> JobKey | None:
    metadata = document.get("metadata") or {}
    name = (
        metadata.get("name")
        if document.get("kind") == KIND
        else (metadata.get("labels") or {}).get(JOB_LABEL)
    )
    return JobKey(str(metadata.get("namespace")), str(name)) if name else None


def _key(document: Document) -> ObjectKey:
    return ObjectKey(
        str(document.get("apiVersion")), str(document.get("kind")), documents.name(document)
    )


def _read(job: JobObjects, document: Document) -> Document | None:
    kind = document.get("kind")
    if kind == KIND:
        return job.resource
    if kind == "Pod":
        return job.pods.get(documents.name(document))
    return job.objects.get(_key(document))


def _write(job: JobObjects, document: Document) -> None:
    kind = document.get("kind")
    if kind == KIND:
        job.resource = document
    elif kind == "Pod":
        job.pods[documents.name(document)] = document
    else:
        job.objects[_key(document)] = document


def _remove(job: JobObjects, document: Document) -> None:
    kind = document.get("kind")
    if kind == KIND:
        job.resource = None
    elif kind == "Pod":
        job.pods.pop(documents.name(document), None)
    else:
        job.objects.pop(_key(document), None)


def _list(job: JobObjects, kind: str) -> list[Document]:
    if kind == KIND:
        return [job.resource] if job.resource else []
    if kind == "Pod":
        return list(job.pods.values())
    return [each for each in job.objects.values() if each.get("kind") == kind]


def _uid(document: Mapping[str, Any]) -> str:
    return documents.text(document, "metadata", "uid")


def _is_newer(document: Document, known: Document | None) -> bool:
    """Whether this is a later version than the known one. The API server's versions of one object
    are numbers that grow.
    """
    if known is None:
        return True
    now, before = (
        documents.text(each, "metadata", "resourceVersion") for each in (document, known)
    )
    if now.isdecimal() and before.isdecimal():
        return int(now) > int(before)
    return now != before


Trim = Callable[[Document], Document]

_log = logging.getLogger(__name__)
_PAUSE_SECONDS = 2.0


class Sink(Protocol):
    """Keeps the copies. Its methods return the jobs that a change concerns."""

    def put(self, document: Document) -> Iterable[JobKey]:
        """Keep an object."""

    def drop(self, document: Document) -> Iterable[JobKey]:
        """Forget a deleted object."""

    def replace(
        self, kind: str, namespace: str | None, listed: Iterable[Document]
    ) -> Iterable[JobKey]:
        """Keep these objects as all that there are."""


class Informer:
    """The copies of one kind of objects, kept by a thread.

    Attributes:
        synced: set once all objects have been listed.
    """

    def __init__(
        self,
        cluster: Cluster,
        sink: Sink,
        kind: tuple[str, str],
        *,
        namespace: str | None,
        selector: str = "",
        metadata_only: bool = False,
        trim: Trim = trim,
        notify: Callable[[Iterable[JobKey]], None],
    ) -> None:
        """Set up an informer; `start` starts it.

        Args:
            cluster: the cluster.
            sink: where the copies are kept.
            kind: API version and kind of the objects.
            namespace: of the objects; None for all namespaces.
            selector: label selector.
            metadata_only: nothing but the metadata is needed.
            trim: leaves of an object what the sink keeps.
            notify: receives the jobs whose objects have changed.
        """
        self._cluster = cluster
        self._sink = sink
        self._kind = kind
        self._namespace = namespace
        self._selector = selector
        self._metadata_only = metadata_only
        self._trim = trim
        self._notify = notify
        self.synced = threading.Event()

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        name = f"watch-{self._kind[1].lower()}"
        start_thread(self._run, name=name, on_error=OnError.RESTART)

    def _run(self) -> None:
        while True:
            try:
                self._keep()
            except ApiError as error:
                if error.status != HTTPStatus.GONE:
                    _log.warning("cannot watch %s: %s", self._kind[1], error)
                    time.sleep(_PAUSE_SECONDS)
            except KdistError as error:
                _log.warning("cannot watch %s: %s", self._kind[1], error)
                time.sleep(_PAUSE_SECONDS)

    def _keep(self) -> None:
        """List and watch until the version has expired."""
        listed, version = self._cluster.list_with_version(
            *self._kind,
            namespace=self._namespace,
            selector=self._selector,
            metadata_only=self._metadata_only,
            trim=self._trim,
        )
        changed = self._sink.replace(self._kind[1], self._namespace, listed)
        self.synced.set()
        self._notify(changed)
        for change, document in self._cluster.follow(
            *self._kind,
            namespace=self._namespace,
            selector=self._selector,
            since=version,
            metadata_only=self._metadata_only,
            trim=self._trim,
        ):
            if change == "BOOKMARK":
                continue
            self._notify((self._sink.drop if change == "DELETED" else self._sink.put)(document))


@dataclass(frozen=True)
class Belongings:
    """The objects of one TrainingJob.

    Attributes:
        own: its ConfigMap.
        workload: the object that makes its pods.
        makers: uids of the workload, and of what that has created to make the pods.
        children: its other objects.
        pods: its pods.
        leaving: pods of a workload of its name that is gone: they end soon.
        rivals: objects with its label that are somebody else's.
    """

    own: documents.Document | None = None
    workload: documents.Document | None = None
    makers: frozenset[str] = frozenset()
    children: Mapping[ObjectKey, documents.Document] = field(default_factory=dict)
    pods: tuple[documents.Document, ...] = ()
    leaving: tuple[documents.Document, ...] = ()
    rivals: Mapping[ObjectKey, documents.Document] = field(default_factory=dict)


def find_backend(resource: Resource, found: JobObjects) -> Backend | None:
    """The kind of a job's workload: as its status says, else that of the workload that it has; None
    if it is not decided.
    """
    chosen = documents.text(resource.status, "backend")
    if chosen in backends.NAMES:
        return backends.get(chosen)
    for each in map(backends.get, backends.NAMES):
        key = ObjectKey(each.api_version, each.kind, resource.key.name)
        if key in found.objects and resource.owns(found.objects[key]):
            return each
    return None


def sort_objects(resource: Resource, found: JobObjects, backend: Backend | None) -> Belongings:
    """Sort what is known of a job.

    Args:
        resource: the TrainingJob.
        found: the objects with the job's label.
        backend: the kind of its workload; None if that is not decided.
    """
    name = resource.key.name
    children: dict[ObjectKey, documents.Document] = {}
    rivals: dict[ObjectKey, documents.Document] = {}
    for key, document in found.objects.items():
        (children if resource.owns(document) else rivals)[key] = document
    own = children.pop(ObjectKey("v1", "ConfigMap", name), None)
    workload = None
    if backend is not None:
        workload = children.pop(ObjectKey(backend.api_version, backend.kind, name), None)
    makers = _find_makers(found.objects, backend, workload)
    for key in [key for key, each in rivals.items() if _uid(each) in makers]:
        del rivals[key]  # made by the workload itself
    owner = resource.owner(makers)
    pods = tuple(pod for pod in found.pods.values() if owner.owns(pod))
    known = {_uid(each) for each in found.objects.values()}
    leaving = tuple(
        pod
        for pod in found.pods.values()
        if is_made_for(pod, name) and not owner.owns(pod) and known.isdisjoint(_owners(pod))
    )
    return Belongings(own, workload, makers, children, pods, leaving, rivals)


def _find_makers(
    objects: Mapping[ObjectKey, documents.Document],
    backend: Backend | None,
    workload: documents.Document | None,
) -> frozenset[str]:
    if backend is None or workload is None:
        return frozenset()
    found = {uid := _uid(workload)}
    for step in backend.pod_owners(documents.name(workload)):
        made = objects.get(ObjectKey(*step))
        if made is None or uid not in _owners(made):
            break
        found.add(uid := _uid(made))
    return frozenset(found)


def _owners(document: documents.Document) -> Iterable[str]:
    owners = documents.items(document, "metadata", "ownerReferences")
    return [documents.text(each, "uid") for each in owners]

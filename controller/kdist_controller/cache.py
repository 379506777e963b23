"""Copies of the objects of all TrainingJobs, kept up to date by watches: `Informer` lists and
watches one kind of objects, `Cache` keeps the trimmed copies by job, so that a thousand jobs fit
into a few megabytes.

Whoever changes an object puts the API server's answer into the cache, so that no decision is made
on an older state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, Protocol

from kdist import backends
from kdist.cluster import ApiError, Cluster
from kdist.errors import KdistError
from kdist.manifest import JOB_LABEL, ObjectKey
from kdist.spec import KIND
from kdist.status import documents
from kdist.threads import OnError, start_thread
from kdist_controller.resource import MAX_VALUES, OVERSIZED, JobKey, Results

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
_PAUSE_SECONDS: Final = 2.0
_log = logging.getLogger(__name__)


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
    if (backend := backends.find(found["apiVersion"], found["kind"])) is not None:
        spec = _choose(document.get("spec"), backend.suspend_patch(True)["spec"])
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


def _trim_pod(pod: Document) -> Document:
    spec, status = pod.get("spec") or {}, _choose(pod.get("status"), _POD_STATUS)
    for name in ("containerStatuses", "initContainerStatuses"):
        if name in status:
            status[name] = [_choose(each, _CONTAINER_STATUS) for each in status[name]]
    names = [{"name": each.get("name")} for each in spec.get("containers") or []]
    found = {**_choose(spec, _POD_SPEC), "containers": names}
    if spec.get("initContainers"):
        found["initContainers"] = [
            _choose(each, _INIT_CONTAINER) for each in spec["initContainers"]
        ]
    return {"spec": found, "status": status}


def _choose(document: Any, keys: Iterable[str]) -> Document:
    found = document if isinstance(document, Mapping) else {}
    return {key: found[key] for key in keys if key in found}


@dataclass
class CachedJob:
    """The objects of one job.

    Attributes:
        own: all of the job's own ConfigMap, as it was fetched last.
        copies: the TrainingJob and all objects with its label.
        results: the latest results of functions of the TrainingJob.
    """

    own: Document | None = None
    copies: dict[ObjectKey, Document] = field(default_factory=dict)
    results: Results = field(default_factory=Results)

    @property
    def resource(self) -> Document | None:
        return next(iter(self.of_kind(KIND)), None)

    @property
    def pods(self) -> dict[str, Document]:
        return {documents.name(pod): pod for pod in self.of_kind("Pod")}

    @property
    def objects(self) -> dict[ObjectKey, Document]:
        return {key: each for key, each in self.copies.items() if key.kind not in (KIND, "Pod")}

    def of_kind(self, kind: str) -> list[Document]:
        return [each for key, each in self.copies.items() if key.kind == kind]


class Cache:
    """The objects of all jobs. Threads may share it."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, CachedJob] = {}
        self._lock = threading.Lock()

    def put(self, document: Document) -> set[JobKey]:
        """Keep an object, already trimmed. Returns its job, if the object is new to the cache;
        nothing for an older version of it, and for what belongs to no job.
        """
        key = _find_job(document)
        if key is None:
            return set()
        with self._lock:
            job = self._jobs.setdefault(key, CachedJob())
            if not _is_newer(document, job.copies.get(_key(document))):
                return set()
            job.copies[_key(document)] = document
        return {key}

    def put_own(self, key: JobKey, document: Document) -> None:
        """Keep all of a job's own ConfigMap."""
        with self._lock:
            job = self._jobs.setdefault(key, CachedJob())
            if _is_newer(document, job.own):
                job.own = document
            known = trim(document)
            if _is_newer(known, job.copies.get(_key(known))):
                job.copies[_key(known)] = known

    def drop(self, document: Document) -> set[JobKey]:
        """Forget a deleted object; returns its job, if the object was known."""
        key = _find_job(document)
        if key is None:
            return set()
        with self._lock:
            job = self._jobs.get(key)
            found = None if job is None else job.copies.get(_key(document))
            if job is None or found is None or documents.uid(found) != documents.uid(document):
                return set()
            del job.copies[_key(document)]
            if not job.copies:
                del self._jobs[key]
        return {key}

    def replace(self, kind: str, namespace: str | None, listed: Iterable[Document]) -> set[JobKey]:
        """Keep these objects, already trimmed, as all that there are of a kind in a namespace, or
        None in all. Returns the jobs of which an object has changed or gone.
        """
        present = {documents.uid(each): each for each in listed}
        changed = [self.put(each) for each in present.values()]
        with self._lock:
            gone = [
                each
                for key, job in self._jobs.items()
                if namespace in (None, key.namespace)
                for each in job.of_kind(kind)
                if documents.uid(each) not in present
            ]
        return set().union(*changed, *map(self.drop, gone))

    def read(self, key: JobKey) -> CachedJob:
        with self._lock:
            job = self._jobs.get(key) or CachedJob()
            return replace(job, copies=dict(job.copies))

    def find_jobs_on(self, node: str) -> set[JobKey]:
        with self._lock:
            return {
                key
                for key, job in self._jobs.items()
                if any(
                    documents.text(pod, "spec", "nodeName") == node for pod in job.of_kind("Pod")
                )
            }

    def list_jobs(self) -> list[tuple[JobKey, Document]]:
        with self._lock:
            return [(key, each) for key, job in self._jobs.items() for each in job.of_kind(KIND)]


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


def _is_newer(document: Document, known: Document | None) -> bool:
    """Whether this is a later version than the known one; versions are growing numbers."""
    if known is None:
        return True
    now, before = (
        documents.text(each, "metadata", "resourceVersion") for each in (document, known)
    )
    if now.isdecimal() and before.isdecimal():
        return int(now) > int(before)
    return now != before


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


@dataclass(eq=False)
class Informer:
    """Keeps the copies of one kind of objects up to date, on a thread.

    Attributes:
        cluster: the cluster.
        sink: where the copies are kept.
        kind: API version and kind of the objects.
        namespace: of the objects; None for all namespaces.
        notify: receives the jobs whose objects have changed.
        selector: label selector.
        metadata_only: nothing but the metadata is needed.
        trim: leaves of an object what the sink keeps.
        synced: set once all objects have been listed.
    """

    cluster: Cluster
    sink: Sink
    kind: tuple[str, str]
    _: KW_ONLY
    namespace: str | None
    notify: Callable[[Iterable[JobKey]], None]
    selector: str = ""
    metadata_only: bool = False
    trim: Callable[[Document], Document] = trim
    synced: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        name = f"watch-{self.kind[1].lower()}"
        start_thread(self._run, name=name, on_error=OnError.RESTART)

    def _run(self) -> None:
        while True:
            try:
                # list and watch until the version has expired
                query: dict[str, Any] = {
                    "namespace": self.namespace,
                    "selector": self.selector,
                    "metadata_only": self.metadata_only,
                    "trim": self.trim,
                }
                listed, version = self.cluster.list_with_version(*self.kind, **query)
                changed = self.sink.replace(self.kind[1], self.namespace, listed)
                self.synced.set()
                self.notify(changed)
                for change, document in self.cluster.follow(*self.kind, since=version, **query):
                    self.notify(
                        (self.sink.drop if change == "DELETED" else self.sink.put)(document)
                    )
            except KdistError as error:
                if not isinstance(error, ApiError) or error.status != HTTPStatus.GONE:
                    _log.warning("cannot watch %s: %s", self.kind[1], error)
                    time.sleep(_PAUSE_SECONDS)

"""Kubernetes events: `Events` lists those of a namespace once and then watches them, `is_about`
selects those of a job: of its pods, deleted ones included, its workload and its volume claims.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from kdist.errors import KdistError
from kdist.status import documents
from kdist.status.documents import Document
from kdist.threads import OnError, start_thread

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_KINDS = (
    "Job",
    "JobSet",
    "TrainJob",
    "PyTorchJob",
    "StatefulSet",
    "TrainingJob",
    "Workload",
    "ConfigMap",
    "PodDisruptionBudget",
)


def is_about(event: Document, name: str, pods: Iterable[Document], claims: Collection[str]) -> bool:
    """Whether an event is about an object of a job. Names decide, because an event outlives its
    object.

    Args:
        event: the event.
        name: of the job.
        pods: the job's pods.
        claims: names of its volume claims.
    """
    kind, about = (
        documents.text(event, "involvedObject", "kind"),
        documents.text(event, "involvedObject", "name"),
    )
    if kind == "Pod":
        return any(documents.name(pod) == about for pod in pods) or is_pod_name(about, name)
    if kind == "PersistentVolumeClaim":
        return about in claims or about == f"{name}-checkpoints"
    if about == name:
        return kind in _KINDS
    # A JobSet creates Jobs of its own name, a role and a number.
    return kind == "Job" and re.fullmatch(rf"{re.escape(name)}-[a-z]+-\d+", about) is not None


def is_pod_name(pod: str, name: str) -> bool:
    """Whether a pod of the job `name` may have this name, for any workload kind."""
    suffix = r"(-(worker|master|node|trainer)(-\d+){1,2}|-\d+)(-[a-z0-9]{5})?"
    return re.fullmatch(re.escape(name) + suffix, pod) is not None


class Events:
    """The current events of one namespace. A shared namespace has thousands, too many to list every
    second, so they are watched.

    Where the user may list but not watch them, or the watch has ended, the next `read` lists them
    again.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._watching: threading.Thread | None = None

    def read(self) -> list[dict[str, Any]]:
        """All events. Raises as `Cluster.list` does."""
        if self._watching is None or not self._watching.is_alive():
            listed, version = self._cluster.list_with_version(
                "v1", "Event", namespace=self._namespace
            )
            self._known = {_event_key(each): each for each in listed}
            if version:  # where the watch starts
                # once it has ended, `read` starts it again
                self._watching = start_thread(
                    partial(self._watch, version), name="events", on_error=OnError.REPORT
                )
        with self._lock:
            return list(self._known.values())

    def _watch(self, version: str) -> None:
        try:
            for change, document in self._cluster.watch(
                "v1", "Event", namespace=self._namespace, since=version
            ):
                with self._lock:
                    if change == "DELETED":
                        self._known.pop(_event_key(document), None)
                    else:
                        self._known[_event_key(document)] = document
        except KdistError:
            return  # the next `read` lists them, and raises the error


def _event_key(event: dict[str, Any]) -> str:
    metadata = event.get("metadata") or {}
    return str(metadata.get("uid") or metadata.get("name"))

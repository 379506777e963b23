"""The Kubernetes events of a namespace, listed once and then watched, and which of them belong to a
job: those of its pods, past ones included, of its workload and of its volume claims.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from kdist.errors import KdistError
from kdist.status import documents
from kdist.status.documents import Document

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_MAKERS = (
    "Job",
    "JobSet",
    "TrainJob",
    "PyTorchJob",
    "StatefulSet",
    "Workload",
    "ConfigMap",
    "PodDisruptionBudget",
)


def is_about(event: Document, name: str, pods: Iterable[Document], claims: Collection[str]) -> bool:
    """Whether the event is about something of the job. Names decide: an event outlives what it is
    about.
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
        return kind in _MAKERS
    # A JobSet makes Jobs with a name and a number of their own.
    return kind == "Job" and re.fullmatch(rf"{re.escape(name)}-[a-z]+-\d+", about) is not None


def is_pod_name(pod: str, name: str) -> bool:
    """Whether a pod of the job `name` may be called so, on any kind of workload."""
    made = r"(-(worker|master|node|trainer)(-\d+){1,2}|-\d+)(-[a-z0-9]{5})?"
    return re.fullmatch(re.escape(name) + made, pod) is not None


class Events:
    """Events of one namespace as they are now; a shared namespace has thousands, which are too many
    to list each second.

    Where they may be listed and not watched, or the watch has ended, the next look lists them anew.
    """

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._watching: threading.Thread | None = None

    def read(self) -> list[dict[str, Any]]:
        """All that are known of. Raises as `Cluster.list` does."""
        if self._watching is None or not self._watching.is_alive():
            listed, version = self._cluster.list_with_version(
                "v1", "Event", namespace=self._namespace
            )
            self._known = {_event_key(each): each for each in listed}
            if version:  # else there is no place to go on from
                self._watching = threading.Thread(target=self._watch, args=(version,), daemon=True)
                self._watching.start()
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
            return  # the next look lists, and says what is wrong


def _event_key(event: dict[str, Any]) -> str:
    metadata = event.get("metadata") or {}
    return str(metadata.get("uid") or metadata.get("name"))

"""Copies of the nodes that are not ready, and which jobs have pods on them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kdist.status import documents
from kdist.status.snapshot import is_silent
from kdist_controller.cache import Cache
from kdist_controller.resource import JobKey

Document = dict[str, Any]


def trim_node(node: Document) -> Document:
    """A node without what no decision needs."""
    metadata = node.get("metadata") or {}
    ready = documents.condition(node, "Ready")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": metadata.get("name"), "uid": metadata.get("uid")},
        "status": {"conditions": [dict(ready)] if ready else []},
    }


class NodeCache:
    """The nodes that are not ready. Its methods return the jobs that a change concerns."""

    def __init__(self, jobs: Cache) -> None:
        self._jobs = jobs
        self._unready: dict[str, Document] = {}
        self._lock = threading.Lock()

    def put(self, node: Document) -> set[JobKey]:
        """Keep a node, already trimmed."""
        name = documents.name(node)
        with self._lock:
            was = name in self._unready
            if is_silent(node):
                self._unready[name] = node
            else:
                self._unready.pop(name, None)
        return self._jobs.find_jobs_on(name) if was or is_silent(node) else set()

    def drop(self, node: Document) -> set[JobKey]:
        """Forget a deleted node."""
        with self._lock:
            self._unready.pop(documents.name(node), None)
        return self._jobs.find_jobs_on(documents.name(node))

    def replace(
        self,
        kind: str,  # noqa: ARG002 - that of every sink
        namespace: str | None,  # noqa: ARG002
        listed: Iterable[Document],
    ) -> set[JobKey]:
        """Keep these nodes as all that there are."""
        with self._lock:
            before = set(self._unready)
            self._unready.clear()
        changed = [self.put(node) for node in listed]
        return set().union(*changed, *map(self._jobs.find_jobs_on, before))

    def find(self, pods: Iterable[Document]) -> dict[str, Document]:
        """The nodes of these pods that are not ready, by name."""
        names = {documents.text(pod, "spec", "nodeName") for pod in pods}
        with self._lock:
            return {name: self._unready[name] for name in names if name in self._unready}

"""The events of a namespace for whoever looks again and again: listed once, and from then on watched."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kdist.errors import KdistError

if TYPE_CHECKING:
    from kdist.cluster import Cluster


class Events:
    """Events of one namespace as they are now; a shared namespace has thousands, which are too many to list each second.

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
            listed, version = self._cluster.list_with_version("v1", "Event", namespace=self._namespace)
            self._known = {_key(each): each for each in listed}
            if version:  # else there is no place to go on from
                self._watching = threading.Thread(target=self._watch, args=(version,), daemon=True)
                self._watching.start()
        with self._lock:
            return list(self._known.values())

    def _watch(self, version: str) -> None:
        try:
            for change, document in self._cluster.watch("v1", "Event", namespace=self._namespace, since=version):
                with self._lock:
                    if change == "DELETED":
                        self._known.pop(_key(document), None)
                    else:
                        self._known[_key(document)] = document
        except KdistError:
            return  # the next look lists, and says what is wrong


def _key(event: dict[str, Any]) -> str:
    metadata = event.get("metadata") or {}
    return str(metadata.get("uid") or metadata.get("name"))

"""Keeps the cache's copies of one kind of objects: lists them, then watches them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Protocol

from kdist.cluster import ApiError, Cluster
from kdist.errors import KdistError
from kdist.threads import OnError, start_thread
from kdist_controller.cache import trim
from kdist_controller.resource import JobKey

Document = dict[str, Any]
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

"""Elects one leader of several replicas by a Lease, with the rules of client-go: a leader renews
the Lease, and one that cannot renew it in time stops; another replica may take a Lease that has
not changed for as long as it lasts. No clock of another machine is compared with ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from kdist.cluster import ApiError, Cluster, guard
from kdist.errors import KdistError
from kdist.status import documents
from kdist.threads import OnError, start_thread

_log = logging.getLogger(__name__)
_API_VERSION: Final = "coordination.k8s.io/v1"
_KIND: Final = "Lease"

LEASE_SECONDS = 15.0
RENEW_SECONDS = 10.0
RETRY_SECONDS = 2.0
REQUEST_SECONDS = RENEW_SECONDS / 2
"""A request that is not answered must leave time for a second one."""


class Election:
    """One candidate for a Lease.

    Args:
        cluster: a connection that does not repeat requests itself.
        name: of the Lease.
        namespace: of the Lease.
        identity: of this candidate; no other one may have it.
        lease_seconds: how long the others wait for a leader that does not renew.
        renew_seconds: how long a leader tries to renew before it stops; less than `lease_seconds`.
        retry_seconds: between two attempts.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        namespace: str,
        identity: str,
        lease_seconds: float = LEASE_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._cluster = cluster.within(namespace)
        self._name = name
        self._identity = identity
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds
        self._retry_seconds = retry_seconds
        self._seen: tuple[str, str] = ("", "")  # holder and version of the Lease, since _changed
        self._changed = 0.0
        self._renewed = float("-inf")
        self._tried = threading.Event()
        self._stopping = threading.Event()

    @property
    def leads(self) -> bool:
        """Whether this candidate may act: it has renewed the Lease a short time ago."""
        return time.monotonic() < self._renewed + self._renew_seconds

    @property
    def heard(self) -> bool:
        """Whether the API server has answered this candidate."""
        return self._tried.is_set()

    def acquire(self) -> bool:
        """Wait until this candidate leads; False if it was told to stop before."""
        while not self._stopping.is_set():
            if self._try():
                _log.info("%s leads", self._identity)
                return True
            self._stopping.wait(self._retry_seconds)
        return False

    def keep(self, lost: Callable[[], None]) -> None:
        """Renew the Lease on a thread, and call `lost` when that did not succeed in time."""
        start_thread(partial(self._renew, lost), name="election", on_error=OnError.EXIT)

    def _renew(self, lost: Callable[[], None]) -> None:
        while not self._stopping.wait(self._retry_seconds):
            if not self._try() and not self.leads:
                lost()
                return

    def stop(self) -> None:
        """Take part no longer: `acquire` returns, and the Lease is not renewed."""
        self._stopping.set()

    def release(self) -> None:
        """Give the Lease back, if this candidate holds it, so that another one need not wait."""
        if not self.leads:
            return
        self._renewed = float("-inf")
        try:
            found = self._cluster.get(_API_VERSION, _KIND, self._name)
            if (found.get("spec") or {}).get("holderIdentity") == self._identity:
                self._patch(found, {"holderIdentity": "", "leaseDurationSeconds": 1})
        except KdistError as error:
            _log.warning("the Lease could not be given back: %s", error)

    def _try(self) -> bool:
        """Whether this candidate holds the Lease now, as it did or from now on."""
        begun = time.monotonic()
        try:
            held = self._take()
        except KdistError as error:
            if not (isinstance(error, ApiError) and error.status == HTTPStatus.CONFLICT):
                _log.warning("cannot change the Lease: %s", error)
            return False
        self._tried.set()
        if held:
            self._renewed = begun  # not when the answer came: the others count from the change
        return held

    def _take(self) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        wanted = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._lease_seconds)),
            "renewTime": now,
        }
        found = self._cluster.look_up(_API_VERSION, _KIND, self._name)
        if found is None:
            lease = {
                "apiVersion": _API_VERSION,
                "kind": _KIND,
                "metadata": {"name": self._name},
                "spec": {**wanted, "acquireTime": now, "leaseTransitions": 0},
            }
            self._cluster.send_create(lease, retry=False)
            return True
        spec: dict[str, Any] = found.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        if holder == self._identity:
            self._patch(found, wanted)
            return True
        version = str(found["metadata"].get("resourceVersion"))
        if self._seen != (holder, version):
            self._seen, self._changed = (holder, version), time.monotonic()
        duration = documents.number(spec, "leaseDurationSeconds") or self._lease_seconds
        if holder and time.monotonic() < self._changed + duration:
            return False
        transitions = (documents.integer(spec, "leaseTransitions") or 0) + 1
        self._patch(found, {**wanted, "acquireTime": now, "leaseTransitions": transitions})
        return True

    def _patch(self, found: dict[str, Any], spec: dict[str, Any]) -> None:
        """Change the Lease as it was read. Raises `ApiError` (409) if it has changed since."""
        self._cluster.send_patch(_API_VERSION, _KIND, self._name, guard({"spec": spec}, found))

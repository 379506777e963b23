"""A client for one ConfigMap over plain HTTP: read it, and replace it if it has not changed since
(optimistic concurrency by `resourceVersion`).

Requests are retried for `retry_seconds` after the errors of a busy, restarting or unreachable API
server: refused and reset connections, time-outs, 429, 5xx. A rejection (401, 403, 404) is permanent
only after a while, since a new role takes a moment to apply everywhere, and never once a request
has succeeded: then somebody is changing the cluster, and a retry may succeed. A caller whose run
has ended, and who only reports that to the others, limits these retries by `refused_seconds`.
"""

from __future__ import annotations

import http.client
import math
import os
import random
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist_trainer.errors import ConfigError
from kdist_trainer.formats import RETRYABLE_STATUSES
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.network.deadline_http import DeadlineConnection, DeadlineTlsConnection
from kdist_trainer.processes.descriptors import spend

JITTER = random.SystemRandom()
"""Spreads the agents' requests. Not `random`'s own generator, which user code may have seeded."""
ACCOUNT = Path("/var/run/secrets/kdist")
"""The mounted service account: a token, which is rotated, and the API server's CA certificate. The
key of the job's exchanges is mounted next to them.
"""
REQUEST_SECONDS = 5.0
REJECTION_SECONDS = 20.0
"""How long rejections are retried before the first successful request."""
_REJECTIONS = {
    401: "does not accept the pod's token for",
    403: "does not permit the pod to use",
    404: "does not have",
}
_MOST_BYTES = 8 << 20  # of a response; etcd holds objects of at most 1.5 MiB
_MIN_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 2.0


class ConflictError(Exception):
    """The ConfigMap was changed since it was read."""


class ApiUnavailableError(OSError):
    """The API server is unreachable or overloaded, and all retries are exhausted."""


class ApiRefusedError(ApiUnavailableError):
    """The API server answers and refuses (401, 403, 404), though it has served requests before."""


class ApiRejectedError(RuntimeError):
    """The API server rejects the request, and a retry would not help."""


@dataclass(frozen=True)
class ApiEndpoint:
    """An API server, by `http` or `https`, and the folder of the service account."""

    host: str
    port: int
    scheme: str = "https"
    account: Path = ACCOUNT

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ApiEndpoint:
        """The API server of this pod's cluster. Raises `ConfigError` outside a pod."""
        try:
            host, port = environ["KUBERNETES_SERVICE_HOST"], int(environ["KUBERNETES_SERVICE_PORT"])
        except (KeyError, ValueError):
            raise ConfigError(
                "KUBERNETES_SERVICE_HOST and _PORT do not name an API server: is this a pod?"
            ) from None
        return cls(host, port, account=Path(environ.get("KDIST_ACCOUNT", ACCOUNT)))

    def connect(self, seconds: float) -> DeadlineConnection | DeadlineTlsConnection:
        """A connection, not open yet, with a limit of `seconds` for each request. Raises `OSError`
        without the CA certificate.
        """
        if self.scheme == "http":
            return DeadlineConnection(self.host, self.port, timeout=seconds)
        context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        return DeadlineTlsConnection(self.host, self.port, timeout=seconds, context=context)

    def headers(self) -> dict[str, str]:
        """The headers of every request. Raises `OSError` without a token."""
        token = spend((self.account / "token").read_text).strip()
        return {
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            "Content-Type": "application/json",
        }


@dataclass(frozen=True)
class Copy:
    """The ConfigMap as read by one request: its binary values, and the rest of the document."""

    values: Mapping[str, bytes]
    document: Mapping[str, Any]
    time: float
    """The monotonic time of the request."""

    @property
    def version(self) -> int:
        """The resourceVersion, higher in the newer of two copies. Raises `ValueError` unless it is
        a number, as in Kubernetes.
        """
        return int(self.document["metadata"]["resourceVersion"])

    def to_json(self) -> bytes:
        """The copy as text, which `from_json` reads in another process."""
        return encode_json({**self.document, "binaryData": _encode(self.values)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Copy:
        """Read what `to_json` returned. Raises `ApiRejectedError` for anything else."""
        return _parse(text, time.monotonic())


class ConfigMap:
    """The ConfigMap `namespace`/`name`. `retry_seconds` returns for how many seconds requests are
    retried; it may change.
    """

    def __init__(
        self, server: ApiEndpoint, namespace: str, name: str, *, retry_seconds: Callable[[], float]
    ) -> None:
        self.server = server
        self.name = f"{namespace}/{name}"
        self.requests = 0
        self.refused_seconds = math.inf
        """How long rejections are retried at most, once a request has succeeded."""
        self._refused_since: float | None = None
        self._refused_status = 0
        self._retry_seconds = retry_seconds
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
        self._connection: DeadlineConnection | DeadlineTlsConnection | None = None
        self._lock = threading.Lock()
        self._served = False
        self._created_at = time.monotonic()

    @property
    def refusal(self) -> str:
        """The status and meaning of the rejection if the API server rejects requests now, though it
        has served others before; else empty.
        """
        if self._refused_since is None:
            return ""
        status = self._refused_status
        return f"{status}: the API server {_REJECTIONS[status]} ConfigMap {self.name}"

    def read(self) -> Copy:
        """Read the ConfigMap.

        Raises:
            ApiUnavailableError: If all retries are exhausted; `ApiRefusedError` if the API server
                has served requests before, and answers with a rejection now.
            ConfigError: If the API server has rejected the requests from the start.
            ApiRejectedError: If the request is invalid.
        """
        requested_at = time.monotonic()
        return _parse(self._request("GET"), requested_at)

    def replace(self, copy: Copy, values: Mapping[str, bytes]) -> Copy:
        """Replace the values, if the ConfigMap has not changed since `copy`; raises what `read`
        raises, too. Raises `ConflictError` if the ConfigMap was changed; after a lost response
        maybe by this very request.
        """
        requested_at = time.monotonic()
        document = {**copy.document, "binaryData": _encode(values)}
        return _parse(self._request("PUT", encode_json(document).encode()), requested_at)

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        with self._lock:
            self._drop()

    def _request(self, method: str, body: bytes | None = None) -> bytes:
        deadline = time.monotonic() + self._retry_seconds()
        pause = _MIN_PAUSE_SECONDS
        while True:
            try:
                status, response, wait = self._send(method, body)
            except (OSError, http.client.HTTPException) as error:
                status, wait, reason = 0, 0.0, f"{type(error).__name__}: {error}"
            else:
                reason = f"status {status}: {response[:200].decode(errors='replace')}"
            if status not in _REJECTIONS:
                self._refused_since = None
            if status in (200, 201):
                self._served = True
                return response
            if status == 409:
                raise ConflictError(self.name)
            if status in _REJECTIONS:
                if not self._served and time.monotonic() > self._created_at + REJECTION_SECONDS:
                    message = (
                        f"the API server {_REJECTIONS[status]} ConfigMap {self.name}, through "
                        f"which this job's agents rendezvous ({reason})"
                    )
                    raise ConfigError(message)
            elif status and status not in RETRYABLE_STATUSES:
                raise ApiRejectedError(f"the API server rejects ConfigMap {self.name}: {reason}")
            # A request to stop the agent shortens the time for retries.
            deadline = min(deadline, time.monotonic() + self._retry_seconds())
            if status in _REJECTIONS and self._served:
                self._refused_status = status
                self._refused_since = self._refused_since or time.monotonic()
                deadline = min(deadline, self._refused_since + self.refused_seconds)
            pause = min(_MAX_PAUSE_SECONDS, pause * 2)
            pause_now = JITTER.uniform(pause / 2, pause) + min(wait, REQUEST_SECONDS)
            if time.monotonic() + pause_now > deadline:
                if status in _REJECTIONS and self._served:
                    raise ApiRefusedError(
                        f"the API server {_REJECTIONS[status]} ConfigMap {self.name} any more: was "
                        f"the job's ServiceAccount, Role or RoleBinding deleted? ({reason})"
                    )
                raise ApiUnavailableError(
                    f"the API server is unavailable for ConfigMap {self.name}: {reason}"
                )
            time.sleep(pause_now)

    def _send(self, method: str, body: bytes | None) -> tuple[int, bytes, float]:
        """Send one request; returns the status, the body, and the value of `Retry-After` in
        seconds.
        """
        with self._lock:
            self.requests += 1
            try:
                if self._connection is None:
                    self._connection = self.server.connect(REQUEST_SECONDS)
                self._connection.renew()
                self._connection.allow(_MOST_BYTES)
                self._connection.request(
                    method, f"{self._path}?fieldManager=kdist-trainer", body, self.server.headers()
                )
                with self._connection.getresponse() as response:
                    content, status = response.read(), response.status
                    wait = response.headers.get("Retry-After", "")
            except BaseException:
                # also an exception of a signal handler, after which the response may be half read
                self._drop()
                raise
        return status, content, float(wait) if wait.isascii() and wait.isdigit() else 0.0

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _encode(values: Mapping[str, bytes]) -> dict[str, str]:
    return {key: b64encode(value).decode() for key, value in values.items()}


def _parse(response: bytes, requested_at: float) -> Copy:
    """Read a ConfigMap. Raises `ApiRejectedError` for anything else."""
    try:
        document = parse_json(response)
        metadata = {
            name: value for name, value in document["metadata"].items() if name != "managedFields"
        }
        values = {
            key: b64decode(value) for key, value in (document.pop("binaryData", None) or {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiRejectedError(f"the API server sent no ConfigMap: {response[:200]!r}") from error
    return Copy(values, {**document, "metadata": metadata}, requested_at)

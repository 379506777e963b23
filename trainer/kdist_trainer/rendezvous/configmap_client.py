"""One ConfigMap over plain HTTP: read it, and replace it if nobody else has since. Free of torch.

Everything that an API server does when it is busy, restarted or away is ridden out for as long as
the caller has patience: refused and cut connections, time-outs, 429, 5xx. A refusal (401, 403, 404)
is believed only after a while, since roles take a moment to be known everywhere, and never once a
request has succeeded: then somebody is at work on the cluster, and waiting is right.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist_trainer.errors import ConfigError
from kdist_trainer.rendezvous.handler import JITTER

ACCOUNT = Path("/var/run/secrets/kdist")
"""Where the pod finds its token (which is replaced from time to time) and the authority that
vouches for the API server.
"""
REQUEST_SECONDS = 5.0
REFUSAL_SECONDS = 20.0
"""How long a refusal may last at first."""
_REFUSALS = {
    401: "does not know the pod's token",
    403: "does not let the pod use it",
    404: "does not have it",
}
_AWAY = {408, 429, 500, 502, 503, 504}
_SHORTEST, _LONGEST = 0.05, 2.0  # seconds between two tries


class ConflictError(Exception):
    """Somebody else has replaced the ConfigMap since it was read."""


class ApiUnavailableError(OSError):
    """The API server has not served the request for as long as the caller had patience."""


class ApiRejectedError(RuntimeError):
    """The API server will never serve the request as it is."""


@dataclass(frozen=True)
class ApiEndpoint:
    """An API server, `http` or `https`, and the folder of the account."""

    host: str
    port: int
    scheme: str = "https"
    account: Path = ACCOUNT

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ApiEndpoint:
        """The one that the kubelet names. Raises `ConfigError` outside a pod."""
        try:
            host, port = environ["KUBERNETES_SERVICE_HOST"], int(environ["KUBERNETES_SERVICE_PORT"])
        except (KeyError, ValueError):
            raise ConfigError(
                "KUBERNETES_SERVICE_HOST and _PORT do not name an API server: is this a pod?"
            ) from None
        return cls(host, port, account=Path(environ.get("KDIST_ACCOUNT", ACCOUNT)))

    def connect(self, seconds: float) -> http.client.HTTPConnection:
        """A connection, not yet opened. Raises `OSError` without the authority's certificate."""
        if self.scheme == "http":
            return http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        context = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        return http.client.HTTPSConnection(self.host, self.port, timeout=seconds, context=context)

    def headers(self) -> dict[str, str]:
        """What every request says. Raises `OSError` without a token."""
        token = (self.account / "token").read_text().strip()
        return {
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            "Content-Type": "application/json",
        }


@dataclass(frozen=True)
class Copy:
    """The ConfigMap as it was at one moment: its binary values, and all the rest of it."""

    values: Mapping[str, bytes]
    document: Mapping[str, Any]
    time: float
    """Monotonic, when it was asked for."""


class ConfigMap:
    """The ConfigMap `namespace`/`name`. `patience` says for how many seconds a request may be tried
    again.
    """

    def __init__(
        self, server: ApiEndpoint, namespace: str, name: str, *, patience: Callable[[], float]
    ) -> None:
        self.server = server
        self.name = f"{namespace}/{name}"
        self.requests = 0
        self._patience = patience
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        self._served = False
        self._born = time.monotonic()

    def read(self) -> Copy:
        """What it holds now. Raises `ApiUnavailableError`, `ConfigError` or `ApiRejectedError`."""
        began = time.monotonic()
        return _parse(self._request("GET"), began)

    def replace(self, copy: Copy, values: Mapping[str, bytes]) -> Copy:
        """Let it hold `values` instead of what `copy` holds. Raises `ConflictError`, and what
        `read` raises.

        After a cut connection a `ConflictError` may be one with this very request.
        """
        began = time.monotonic()
        encoded = {key: b64encode(value).decode() for key, value in values.items()}
        return _parse(
            self._request("PUT", json.dumps({**copy.document, "binaryData": encoded}).encode()),
            began,
        )

    def close(self) -> None:
        """Close the connection; another request opens one again."""
        with self._lock:
            self._drop()

    def _request(self, method: str, body: bytes | None = None) -> bytes:
        deadline, pause, why = time.monotonic() + self._patience(), _SHORTEST, ""
        while True:
            try:
                status, answer, wait = self._exchange(method, body)
            except (OSError, http.client.HTTPException) as error:
                status, wait, why = 0, 0.0, f"{type(error).__name__}: {error}"
            else:
                why = f"status {status}: {answer[:200].decode(errors='replace')}"
            if status in (200, 201):
                self._served = True
                return answer
            if status == 409:
                raise ConflictError(self.name)
            self._give_up(status, why)
            # The patience may have changed meanwhile: somebody asked the agent to stop.
            deadline = min(deadline, time.monotonic() + self._patience())
            pause = min(_LONGEST, pause * 2)
            rest = JITTER.uniform(pause / 2, pause) + min(wait, REQUEST_SECONDS)
            if time.monotonic() + rest > deadline:
                raise ApiUnavailableError(
                    f"the API server does not serve ConfigMap {self.name}: {why}"
                )
            time.sleep(rest)

    def _give_up(self, status: int, why: str) -> None:
        """Raise if trying again cannot help."""
        if status in _REFUSALS:
            if not self._served and time.monotonic() > self._born + REFUSAL_SECONDS:
                message = (
                    f"the API server {_REFUSALS[status]}: ConfigMap {self.name}, which this "
                    f"job's agents meet by ({why})"
                )
                raise ConfigError(message)
        elif status and status not in _AWAY:
            raise ApiRejectedError(f"the API server refuses ConfigMap {self.name}: {why}")

    def _exchange(self, method: str, body: bytes | None) -> tuple[int, bytes, float]:
        """One request: status, answer, and the seconds to wait that the server asks for."""
        with self._lock:
            self.requests += 1
            try:
                if self._connection is None:
                    self._connection = self.server.connect(REQUEST_SECONDS)
                self._connection.request(
                    method, f"{self._path}?fieldManager=kdist-trainer", body, self.server.headers()
                )
                with self._connection.getresponse() as response:
                    answer, status = response.read(), response.status
                    wait = response.headers.get("Retry-After", "")
            except BaseException:
                # also an exception of a signal handler: half an answer is no state to go on from
                self._drop()
                raise
        return status, answer, float(wait) if wait.isascii() and wait.isdigit() else 0.0

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _parse(answer: bytes, began: float) -> Copy:
    """Read a ConfigMap. Raises `ApiRejectedError` for anything else."""
    try:
        document = json.loads(answer)
        metadata = {
            name: value for name, value in document["metadata"].items() if name != "managedFields"
        }
        values = {
            key: b64decode(value) for key, value in (document.pop("binaryData", None) or {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiRejectedError(f"the API server sent no ConfigMap: {answer[:200]!r}") from error
    return Copy(values, {**document, "metadata": metadata}, began)

"""HTTP client of an agent, which serves `/status`, `/metrics` and `/healthz`.

One `AgentClient` talks to one agent over a transport: the API server's proxy, a forwarded port, or
loopback for an agent on this machine. An agent that does not answer, whatever the reason, yields
None and no error: pods start, end and become unreachable while they are polled.

A pod runs the user's image, so it is trusted with nothing: an answer has a deadline for its headers
and its body together and a bound on its size, redirects are not followed, and of `/status` only
what `read_agent_document` accepts is kept.

`kdist.job.cluster.agents` polls all agents of a job in the cluster, `kdist.job.local.agents` those
of a run on this machine.
"""

from __future__ import annotations

import http.client
import threading
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

from kdist.agents.metrics import AgentSample
from kdist.errors import KdistError
from kdist.status.agent_status import read_agent_document
from kdist_trainer.formats import METRICS_PORT, NewerFormatError, check_format
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json
from kdist_trainer.network.deadline_http import DeadlineConnection

if TYPE_CHECKING:
    from kdist.cluster import Cluster


TIMEOUT: Final = 5.0
"""Seconds for one response from the first byte of the request to the last one of the body, unless
the caller says otherwise.
"""
STATUS_BYTES: Final = 256 << 10
METRICS_BYTES: Final = 2 << 20
_HEADER_BYTES: Final = 16 << 10
_PARSING: Final = threading.Lock()
"""Held while a document is parsed and cut down: a parsed one takes up to 30 times its size, and so
there is only one at a time.
"""


class AgentTransport(Protocol):
    """A route to one agent."""

    def get(self, path: str, *, timeout: float, most: int) -> bytes | None:
        """Body of `GET path`; None without a whole response of status 200 and of at most `most`
        bytes within `timeout` seconds.
        """


@dataclass(frozen=True)
class PodTransport:
    """Requests directly to a host, as from one pod to another in a cluster, or to a port on this
    machine.
    """

    host: str
    port: int = METRICS_PORT

    def get(self, path: str, *, timeout: float, most: int) -> bytes | None:
        try:
            connection = DeadlineConnection(self.host, self.port, timeout=timeout)
            with closing(connection):
                connection.allow(most + _HEADER_BYTES)
                connection.request("GET", path)
                response = connection.getresponse()
                if response.status != HTTPStatus.OK or (response.length or 0) > most:
                    return None
                body = response.read(most + 1)
                return body if len(body) <= most and not response.length else None
        except (OSError, OverflowError, http.client.HTTPException):
            return None


@dataclass(frozen=True)
class ProxyTransport:
    """Through the API server's proxy, which a NetworkPolicy may keep from the pod."""

    cluster: Cluster
    pod: str
    namespace: str | None = None

    def get(self, path: str, *, timeout: float, most: int) -> bytes | None:
        try:
            return self.cluster.proxy(
                self.pod, METRICS_PORT, path, namespace=self.namespace, timeout=timeout, most=most
            )
        except (KdistError, OSError):
            return None


@dataclass(frozen=True)
class TunnelTransport:
    """Over a forwarded port, which ends inside the pod, so that no NetworkPolicy stops it. Costs
    more than the proxy.
    """

    cluster: Cluster
    pod: str
    namespace: str | None = None

    def get(self, path: str, *, timeout: float, most: int) -> bytes | None:
        try:
            with self.cluster.forward(self.pod, METRICS_PORT, namespace=self.namespace) as port:
                return PodTransport("127.0.0.1", port).get(path, timeout=timeout, most=most)
        except (KdistError, OSError):
            return None


class AgentClient:
    """Requests to one agent, each with a limit of seconds. The transports are tried in their order;
    the first one that yields a response is used from then on.
    """

    def __init__(self, *transports: AgentTransport, timeout: float = TIMEOUT) -> None:
        self._transports: tuple[AgentTransport, ...] = transports
        self._timeout = timeout

    def get(self, path: str, *, most: int) -> bytes | None:
        """Body of `GET path`, of at most `most` bytes; None if no transport yields a response."""
        for transport in self._transports:
            body = transport.get(path, timeout=self._timeout, most=most)
            if body is not None:
                self._transports = (transport,)
                return body
        return None

    def status(self) -> dict[str, Any] | None:
        """What can be read of the agent's `/status`; None without an answer that is JSON."""
        body = self.get("/status", most=STATUS_BYTES)
        if body is None:
            return None
        with _PARSING:
            try:
                document = parse_json(body, max_bytes=STATUS_BYTES, allow_nan=True)
                check_format("/status", document)
            except MalformedTextError:
                return None
            except NewerFormatError as error:
                return {"state": f"unknown, as {error}"}
            return read_agent_document(document) if isinstance(document, dict) else None

    def metrics(self) -> str:
        """The agent's `/metrics` in Prometheus' text format; empty if it does not answer."""
        return (self.get("/metrics", most=METRICS_BYTES) or b"").decode(errors="replace")

    def sample(self, *, metrics: bool = True) -> AgentSample | None:
        """The agent's status and, with `metrics`, its metrics; None if it does not answer."""
        status = self.status()
        return None if status is None else AgentSample(status, self.metrics() if metrics else "")

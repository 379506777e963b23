"""HTTP client of an agent, which serves `/status`, `/metrics` and `/healthz`.

One `AgentClient` talks to one agent over a transport: the API server's proxy, a forwarded port, or
loopback for an agent on this machine. An agent that does not answer, whatever the reason, yields
None and no error: pods start, end and become unreachable while they are polled.

`kdist.jobs.agents` polls all agents of a job in the cluster, `kdist.local.agents` those of a run on
this machine.
"""

from __future__ import annotations

import http.client
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

from kdist.agent_metrics import METRICS_PORT, AgentSample
from kdist.errors import KdistError
from kdist_trainer.untrusted_text import MalformedTextError, parse_json

if TYPE_CHECKING:
    from kdist.cluster import Cluster

TIMEOUT: Final = 5.0
"""Seconds for one response, unless the caller says otherwise."""
_MAX_BYTES: Final = 4 << 20


class AgentTransport(Protocol):
    """A route to one agent."""

    def get(self, path: str, *, timeout: float) -> bytes | None:
        """Body of `GET path`; None without a response of status 200 within `timeout` seconds."""


@dataclass(frozen=True)
class PodTransport:
    """Straight to a host, which a pod of the same cluster reaches another one by."""

    host: str
    port: int = METRICS_PORT

    def get(self, path: str, *, timeout: float) -> bytes | None:
        """See `AgentTransport.get`."""
        try:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
            with closing(connection):
                connection.request("GET", path)
                response = connection.getresponse()
                return response.read(_MAX_BYTES) if response.status == HTTPStatus.OK else None
        except (OSError, OverflowError, http.client.HTTPException):
            return None


@dataclass(frozen=True)
class LoopbackTransport:
    """To a port on this machine."""

    port: int

    def get(self, path: str, *, timeout: float) -> bytes | None:
        """See `AgentTransport.get`."""
        return PodTransport("127.0.0.1", self.port).get(path, timeout=timeout)


@dataclass(frozen=True)
class ProxyTransport:
    """Through the API server's proxy, which a NetworkPolicy may keep from the pod."""

    cluster: Cluster
    pod: str
    namespace: str | None = None

    def get(self, path: str, *, timeout: float) -> bytes | None:
        """See `AgentTransport.get`."""
        try:
            return self.cluster.proxy(
                self.pod, METRICS_PORT, path, namespace=self.namespace, timeout=timeout
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

    def get(self, path: str, *, timeout: float) -> bytes | None:
        """See `AgentTransport.get`."""
        try:
            with self.cluster.forward(self.pod, METRICS_PORT, namespace=self.namespace) as port:
                return LoopbackTransport(port).get(path, timeout=timeout)
        except (KdistError, OSError):
            return None


class AgentClient:
    """Requests to one agent.

    Args:
        transports: in the order in which they are tried. The first one that yields a response is
            used from then on.
        timeout: seconds for one response.
    """

    def __init__(self, *transports: AgentTransport, timeout: float = TIMEOUT) -> None:
        self._transports: tuple[AgentTransport, ...] = transports
        self._timeout = timeout

    def get(self, path: str) -> bytes | None:
        """Body of `GET path`; None if no transport yields a response."""
        for transport in self._transports:
            body = transport.get(path, timeout=self._timeout)
            if body is not None:
                self._transports = (transport,)
                return body
        return None

    def status(self) -> dict[str, Any] | None:
        """The agent's `/status`; None if it does not answer with a JSON object."""
        try:
            document = parse_json(self.get("/status") or b"", allow_nan=True)
        except MalformedTextError:
            return None
        return document if isinstance(document, dict) else None

    def metrics(self) -> str:
        """The agent's `/metrics` in Prometheus' text format; empty if it does not answer."""
        return (self.get("/metrics") or b"").decode(errors="replace")

    def sample(self, *, metrics: bool = True) -> AgentSample | None:
        """The agent's status together with its metrics, which stay empty without `metrics`; None if
        it does not answer.
        """
        status = self.status()
        return None if status is None else AgentSample(status, self.metrics() if metrics else "")

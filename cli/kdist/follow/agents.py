"""Asks the agents of a job for their `/status`: through the API server, and where that is cut off, over a forwarded port."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kdist.errors import KdistError
from kdist.status import Pod

if TYPE_CHECKING:
    from kdist.cluster import Cluster

PORT = 9401
TIMEOUT = 3.0  # seconds for one answer
_LOST = 1.0  # seconds for an answer of a pod whose node seems to be silent
_THREADS = 32
_ALTOGETHER = 20.0  # seconds for all answers; where many agents are silent, those that are left over are not asked
_FORWARDS = 4  # agents that are asked over a forwarded port, which is dearer, when the API server's proxy is cut off
_LARGEST = 1 << 20
_UNASKED: dict[str, Any] = {}


class Agents:
    """Remembers from one snapshot to the next which way leads to a job's agents.

    `timeout` is seconds for one answer and `altogether` for all of them, `forwards` how many agents at most are asked over a
    forwarded port. `unasked` counts those for which there was no time when they were asked last.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        timeout: float = TIMEOUT,
        forwards: int = _FORWARDS,
        altogether: float = _ALTOGETHER,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._timeout = timeout
        self._forwards = forwards
        self._altogether = altogether
        self.unasked = 0
        self._forwarded: set[str] = set()

    def ask(self, pods: Sequence[Pod]) -> dict[str, dict[str, Any]]:
        """The documents of those that answer, by pod. Of a pod on a node that seems to be silent an answer is the best news."""
        asked = [pod.name for pod in pods if pod.running]
        lost = {pod.name for pod in pods if pod.lost}
        self.unasked = 0
        if not asked:
            return {}
        end = time.monotonic() + self._altogether
        with ThreadPoolExecutor(min(_THREADS, len(asked))) as pool:
            begun = [pool.submit(self._ask_in_time, name, end, _LOST if name in lost else self._timeout) for name in asked]
            answers = {name: each.result() for name, each in zip(asked, begun, strict=True)}
            self.unasked = sum(answer is _UNASKED for answer in answers.values())
            silent = [name for name in asked if answers[name] is None and name not in self._forwarded | lost]
            chosen = silent[: self._forwards]
            for name, answer in zip(chosen, pool.map(self._ask_forwarded, chosen), strict=True):
                if answer is not None:
                    self._forwarded.add(name)
                    answers[name] = answer
        return {name: answer for name, answer in answers.items() if answer is not None and answer is not _UNASKED}

    def _ask_in_time(self, pod: str, end: float, timeout: float) -> dict[str, Any] | None:
        return self._ask_one(pod, timeout) if time.monotonic() < end else _UNASKED

    def _ask_one(self, pod: str, timeout: float) -> dict[str, Any] | None:
        if pod in self._forwarded:
            return self._ask_forwarded(pod)
        try:
            return _parse(self._cluster.proxy(pod, PORT, "status", namespace=self._namespace, timeout=timeout))
        except (KdistError, OSError):
            return None

    def _ask_forwarded(self, pod: str) -> dict[str, Any] | None:
        """Over the kubelet, which a NetworkPolicy does not stop."""
        with (
            suppress(KdistError, OSError, http.client.HTTPException),
            self._cluster.forward(pod, PORT, namespace=self._namespace) as port,
            closing(http.client.HTTPConnection("127.0.0.1", port, timeout=self._timeout)) as connection,
        ):
            connection.request("GET", "/status")
            response = connection.getresponse()
            return _parse(response.read(_LARGEST)) if response.status == HTTPStatus.OK else None
        return None


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body[:_LARGEST])
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None

"""Requests to the agents of a job in the cluster, for their `/status` and their metrics.

All agents are asked at the same time, each with a short timeout: through the API server's proxy, or
over a forwarded port where the proxy is refused or cannot reach the pods.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kdist import rbac
from kdist.agent_metrics import AgentSample
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.status import Pod

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.jobs.job import ClusterJob

PORT = 9401
WAYS = (rbac.on_pods("get", part="proxy"), rbac.on_pods("create get", part="portforward"))
"""Rights of which one set is needed to ask an agent."""
_AT_ONCE = 16


def read(
    target: ClusterJob, pods: Sequence[Pod], *, metrics: bool = False, timeout: float = 5.0
) -> dict[str, AgentSample]:
    """What each running pod's agent says; pods that do not answer within `timeout` seconds are left
    out.
    """
    at_work = [pod for pod in pods if pod.running]
    if not at_work:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(at_work))) as pool:
        found = list(pool.map(lambda pod: _read(target, pod, metrics, timeout), at_work))
    return {
        pod.name: reading
        for pod, reading in zip(at_work, found, strict=True)
        if reading is not None
    }


def explain_silence(target: ClusterJob) -> KdistError:
    """Why no agent answers. Raises `KdistError` (FORBIDDEN) where the user has no right to ask."""
    if any(pod.running for pod in target.pods()):
        rbac.require_one_of(target.cluster, *WAYS)
    return KdistError(f"no agent of {target.name} answers", next_command=target.command("status"))


def _read(target: ClusterJob, pod: Pod, metrics: bool, timeout: float) -> AgentSample | None:
    way = _by_proxy
    status = way(target, pod, "/status", timeout)
    if status is None:
        way = _by_tunnel
        status = way(target, pod, "/status", timeout)
    if status is None:
        return None
    page = way(target, pod, "/metrics", timeout) if metrics else b""
    try:
        document: Any = json.loads(status)
    except ValueError:
        return None
    return AgentSample(
        document if isinstance(document, dict) else {}, (page or b"").decode(errors="replace")
    )


def _by_proxy(target: ClusterJob, pod: Pod, path: str, timeout: float) -> bytes | None:
    try:
        return target.cluster.proxy(pod.name, PORT, path, timeout=timeout)
    except KdistError:
        return None


def _by_tunnel(target: ClusterJob, pod: Pod, path: str, timeout: float) -> bytes | None:
    """Where a NetworkPolicy keeps the API server from the pod: by a forwarded port, which ends
    inside of it.
    """
    import http.client

    try:
        with target.cluster.forward(pod.name, PORT) as local:
            connection = http.client.HTTPConnection("127.0.0.1", local, timeout=timeout)
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
    except (KdistError, OSError, http.client.HTTPException):
        return None


def choose_pod(target: ClusterJob, *, rank: int | None = None, pod: str = "") -> Pod:
    """The running pod that is meant: by its name, by a rank that it holds, or the one with rank 0.

    Raises `NotFoundError`, saying which there are.
    """
    pods = target.pods()
    running = [one for one in pods if one.running]
    if pod and rank is not None:
        raise UsageError("--rank and --pod say the same: give one of them")
    if pod:
        found = next((one for one in running if one.name == pod), None)
        if found is None:
            raise _no_pod(target, f"no pod {pod} of {target.name} runs", pods)
        return found
    if not running:
        raise _no_pod(target, f"no pod of {target.name} runs", pods)
    readings = read(target, running, timeout=3.0)
    holder = next(
        (name for name, reading in readings.items() if (rank or 0) in reading.ranks), None
    )
    if holder is None and rank is None:
        return running[0]
    if holder is None:
        there = sorted({each for reading in readings.values() for each in reading.ranks})
        shown = f"ranks there are: {_spans(there)}" if there else "no agent tells its ranks yet"
        raise NotFoundError(
            f"no pod of {target.name} has rank {rank}; {shown}",
            next_command=target.command("status"),
        )
    return next(one for one in running if one.name == holder)


def _no_pod(target: ClusterJob, what: str, pods: Sequence[Pod]) -> NotFoundError:
    there = ", ".join(f"{one.name} ({one.state})" for one in pods[:8]) or "none"
    return NotFoundError(f"{what}; its pods: {there}", next_command=target.command("why"))


def _spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


TIMEOUT = 3.0  # seconds for one answer
_LOST = 1.0  # seconds for an answer of a pod whose node seems to be silent
_THREADS = 32
# seconds for all answers; where many agents are silent, those that are left over are not asked
_ALTOGETHER = 20.0
# agents that are asked over a forwarded port, which is dearer, when the API server's proxy is cut
# off
_FORWARDS = 4
_LARGEST = 1 << 20
_UNASKED: dict[str, Any] = {}


class Agents:
    """Remembers from one snapshot to the next which way leads to a job's agents.

    `timeout` is seconds for one answer and `altogether` for all of them, `forwards` how many agents
    at most are asked over a forwarded port. `unasked` counts those for which there was no time when
    they were asked last.
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
        """The documents of those that answer, by pod. Of a pod on a node that seems to be silent an
        answer is the best news.
        """
        asked = [pod.name for pod in pods if pod.running]
        lost = {pod.name for pod in pods if pod.lost}
        self.unasked = 0
        if not asked:
            return {}
        end = time.monotonic() + self._altogether
        with ThreadPoolExecutor(min(_THREADS, len(asked))) as pool:
            begun = [
                pool.submit(self._ask_in_time, name, end, _LOST if name in lost else self._timeout)
                for name in asked
            ]
            answers = {name: each.result() for name, each in zip(asked, begun, strict=True)}
            self.unasked = sum(answer is _UNASKED for answer in answers.values())
            silent = [
                name
                for name in asked
                if answers[name] is None and name not in self._forwarded | lost
            ]
            chosen = silent[: self._forwards]
            for name, answer in zip(chosen, pool.map(self._ask_forwarded, chosen), strict=True):
                if answer is not None:
                    self._forwarded.add(name)
                    answers[name] = answer
        return {
            name: answer
            for name, answer in answers.items()
            if answer is not None and answer is not _UNASKED
        }

    def _ask_in_time(self, pod: str, end: float, timeout: float) -> dict[str, Any] | None:
        return self._ask_one(pod, timeout) if time.monotonic() < end else _UNASKED

    def _ask_one(self, pod: str, timeout: float) -> dict[str, Any] | None:
        if pod in self._forwarded:
            return self._ask_forwarded(pod)
        try:
            return _parse(
                self._cluster.proxy(pod, PORT, "status", namespace=self._namespace, timeout=timeout)
            )
        except (KdistError, OSError):
            return None

    def _ask_forwarded(self, pod: str) -> dict[str, Any] | None:
        """Over the kubelet, which a NetworkPolicy does not stop."""
        with (
            suppress(KdistError, OSError, http.client.HTTPException),
            self._cluster.forward(pod, PORT, namespace=self._namespace) as port,
            closing(
                http.client.HTTPConnection("127.0.0.1", port, timeout=self._timeout)
            ) as connection,
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

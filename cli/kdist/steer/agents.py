"""The agents of a job in the cluster: asked through the API server, all at once, each for a short time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdist import rights
from kdist.errors import KdistError, NotFoundError, UsageError
from kdist.status import Pod
from kdist.steer.readings import Reading
from kdist.steer.target import Target

PORT = 9401
WAYS = (rights.on_pods("get", part="proxy"), rights.on_pods("create get", part="portforward"))
"""Rights of which one set is needed to ask an agent."""
_AT_ONCE = 16


def read(target: Target, pods: Sequence[Pod], *, metrics: bool = False, timeout: float = 5.0) -> dict[str, Reading]:
    """What each running pod's agent says; pods that do not answer within `timeout` seconds are left out."""
    at_work = [pod for pod in pods if pod.running]
    if not at_work:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(at_work))) as pool:
        found = list(pool.map(lambda pod: _read(target, pod, metrics, timeout), at_work))
    return {pod.name: reading for pod, reading in zip(at_work, found, strict=True) if reading is not None}


def explain_silence(target: Target) -> KdistError:
    """Why no agent answers. Raises `KdistError` (FORBIDDEN) where the user has no right to ask."""
    if any(pod.running for pod in target.pods()):
        rights.require_one_of(target.cluster, *WAYS)
    return KdistError(f"no agent of {target.name} answers", next_command=target.command("status"))


def _read(target: Target, pod: Pod, metrics: bool, timeout: float) -> Reading | None:
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
    return Reading(document if isinstance(document, dict) else {}, (page or b"").decode(errors="replace"))


def _by_proxy(target: Target, pod: Pod, path: str, timeout: float) -> bytes | None:
    try:
        return target.cluster.proxy(pod.name, PORT, path, timeout=timeout)
    except KdistError:
        return None


def _by_tunnel(target: Target, pod: Pod, path: str, timeout: float) -> bytes | None:
    """Where a NetworkPolicy keeps the API server from the pod: by a forwarded port, which ends inside of it."""
    import http.client

    try:
        with target.cluster.forward(pod.name, PORT) as local:
            connection = http.client.HTTPConnection("127.0.0.1", local, timeout=timeout)
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
    except (KdistError, OSError, http.client.HTTPException):
        return None


def choose_pod(target: Target, *, rank: int | None = None, pod: str = "") -> Pod:
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
    holder = next((name for name, reading in readings.items() if (rank or 0) in reading.ranks), None)
    if holder is None and rank is None:
        return running[0]
    if holder is None:
        there = sorted({each for reading in readings.values() for each in reading.ranks})
        shown = f"ranks there are: {_spans(there)}" if there else "no agent tells its ranks yet"
        raise NotFoundError(f"no pod of {target.name} has rank {rank}; {shown}", next_command=target.command("status"))
    return next(one for one in running if one.name == holder)


def _no_pod(target: Target, what: str, pods: Sequence[Pod]) -> NotFoundError:
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

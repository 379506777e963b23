"""Polls the agents of a run on this machine: which run is active, its agents' ports, and their
`/status` and metrics. `StatusPoller` requests them in one thread per agent, so that a slow response
delays neither the live view nor the training.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kdist.agents.client import AgentClient, PodTransport
from kdist.agents.metrics import AgentSample
from kdist.job.local import run_dir
from kdist.threads import OnError, start_thread

_SAMPLE_TIMEOUT = 2.0  # seconds for one response
_STATUS_TIMEOUT = 1.0


def is_active(root: Path) -> bool:
    """Whether an active `kdist run` holds the lock of the folder."""
    try:
        lock = os.open(root / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def fetch_samples(root: Path, *, metrics: bool = False) -> dict[str, AgentSample]:
    """Poll the agents of the run in `root` once, with `metrics` for `/metrics` too. Returns the
    sample of each agent that answered, by its node; empty if the run is not active.
    """
    if not is_active(root):
        return {}
    samples = {
        node: client(port, timeout=_SAMPLE_TIMEOUT).sample(metrics=metrics)
        for node, port in ports(root).items()
    }
    return {node: sample for node, sample in samples.items() if sample is not None}


def client(port: int, *, timeout: float) -> AgentClient:
    """Requests to the agent at a port of this machine."""
    return AgentClient(PodTransport("127.0.0.1", port), timeout=timeout)


def ports(root: Path) -> dict[str, int]:
    """Port of each agent by its node, as the agents recorded them."""
    found = {scratch.name: read_port(scratch) for scratch in sorted(root.glob("node-*"))}
    return {node: port for node, port in found.items() if port is not None}


def read_port(scratch: Path) -> int | None:
    """Port of the agent with this scratch folder; None before it listens."""
    port = (run_dir.read_json(scratch / "agent.json") or {}).get("port")
    return port if isinstance(port, int) else None


@dataclass(frozen=True)
class StatusReply:
    """The last status that an agent reported.

    Attributes:
        status: the document; empty before the first response.
        asked_at: when it was requested, in monotonic seconds.
        answered_at: when the response came, in monotonic seconds; None before the first one.
    """

    status: Mapping[str, Any]
    asked_at: float
    answered_at: float | None

    def silence(self, now: float) -> float:
        """Seconds since the last response, or since the first request if there was none."""
        return now - (self.answered_at if self.answered_at is not None else self.asked_at)


class StatusPoller:
    """Polls every agent in a thread of its own, and keeps the newest status of each.

    Args:
        scratch: scratch folder of each node, in which `agent.json` holds the agent's port.
        interval: seconds between two requests to one agent.
    """

    def __init__(self, scratch: Mapping[str, Path], *, interval: float = 0.5) -> None:
        self._scratch = dict(scratch)
        self._interval = interval
        self._replies: dict[str, StatusReply] = {}
        self._closed = threading.Event()

    def start(self) -> None:
        """Start polling."""
        for node in self._scratch:
            start_thread(partial(self._poll, node), name=f"status {node}", on_error=OnError.RESTART)

    def close(self) -> None:
        """Stop polling. Threads that wait for a response end by themselves and are not waited
        for.
        """
        self._closed.set()

    def replies(self) -> dict[str, StatusReply]:
        """The newest reply of each node that has been polled."""
        return dict(self._replies)

    def _poll(self, node: str) -> None:
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            previous = self._replies.get(node) or StatusReply({}, now, None)
            port = read_port(self._scratch[node])
            status = None if port is None else client(port, timeout=_STATUS_TIMEOUT).status()
            self._replies[node] = (
                previous if status is None else StatusReply(status, now, time.monotonic())
            )

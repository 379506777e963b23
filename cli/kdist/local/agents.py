"""The agents of a run on this machine, from outside: which run is active, its agents' ports, and
their `/status` and metrics. `StatusPoller` requests them in one thread per agent, so that a slow
answer delays neither the live view nor the training.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist.agent_metrics import AgentSample
from kdist.local import run_dir

_MOST_BYTES = 4 << 20


def find_run(name: str) -> Path | None:
    """The run folder that NAME means: a job of `.kdist` (or `$KDIST_HOME`), or a path to one; None
    if there is none.

    A path to a folder of checkpoints will do too.
    """
    if os.sep not in name:
        root = run_dir.home() / name
        return root if (root / "run.json").is_file() else None
    root = Path(name).absolute()
    known = (root / "run.json").is_file() or (root / "ledger").is_dir() or any(root.glob("step-*"))
    return root if known else None


def is_at_work(root: Path) -> bool:
    """Whether a `kdist run` holds the folder."""
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


def read(root: Path, *, metrics: bool = False) -> dict[str, AgentSample]:
    """What each agent that is at work says, by its node."""
    found = {}
    for node, port in ports(root).items() if is_at_work(root) else ():
        status = ask_agents(port, "/status")
        if status is None:
            continue
        page = ask_agents(port, "/metrics") if metrics else b""
        with contextlib.suppress(ValueError):
            document = json.loads(status)
            found[node] = AgentSample(
                document if isinstance(document, dict) else {},
                (page or b"").decode(errors="replace"),
            )
    return found


def ports(root: Path) -> dict[str, int]:
    """Port of each agent by its node, as the agents wrote them down."""
    found = {}
    for scratch in sorted(root.glob("node-*")):
        note = run_dir.read_json(scratch / "agent.json")
        if note and isinstance(note.get("port"), int):
            found[scratch.name] = int(note["port"])
    return found


def ask_agents(port: int, path: str, *, timeout: float = 2.0) -> bytes | None:
    """What an agent on this machine answers to `GET path`, None if it does not. Seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read(_MOST_BYTES) if response.status == 200 else None
    except (OSError, OverflowError, http.client.HTTPException):
        return None
    finally:
        connection.close()


TIMEOUT = 1.0  # seconds for one answer


@dataclass(frozen=True)
class StatusReply:
    """The last status that an agent gave. `asked_at` and `answered_at` are monotonic seconds; the
    latter is None before any.
    """

    status: Mapping[str, Any]
    asked_at: float
    answered_at: float | None

    def silence(self, now: float) -> float:
        """Seconds since the last answer, or since the first question."""
        return now - (self.answered_at if self.answered_at is not None else self.asked_at)


class StatusPoller:
    """Keeps the newest answer of every agent. `scratch` names each node's folder, where
    `agent.json` tells the port.
    """

    def __init__(self, scratch: Mapping[str, Path], *, every: float = 0.5) -> None:
        self._scratch = dict(scratch)
        self._every = every
        self._answers: dict[str, StatusReply] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(node,), daemon=True, name=f"status {node}")
            for node in scratch
        ]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ask no more. Threads that wait for an answer end by themselves and are not waited for."""
        self._over.set()

    def answers(self) -> dict[str, StatusReply]:
        """The newest answer of each node that has been asked."""
        return dict(self._answers)

    def _ask_on(self, node: str) -> None:
        while not self._over.wait(self._every):
            now = time.monotonic()
            previous = self._answers.get(node) or StatusReply({}, now, None)
            note = run_dir.read_json(self._scratch[node] / "agent.json")
            status = ask(note.get("port")) if note else None
            self._answers[node] = (
                previous if status is None else StatusReply(status, now, time.monotonic())
            )


def ask(port: object) -> dict[str, Any] | None:
    """The status that an agent on this machine gives at `port`, or None if it gives none."""
    if not isinstance(port, int):
        return None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/status")
        response = connection.getresponse()
        status = json.loads(response.read(1 << 20)) if response.status == 200 else None
    except (OSError, OverflowError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return status if isinstance(status, dict) else None

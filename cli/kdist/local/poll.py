"""Asks each agent for its `/status`, in a thread of its own, so that a slow answer delays neither the view nor the training."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist.local import folder

TIMEOUT = 1.0  # seconds for one answer


@dataclass(frozen=True)
class Answer:
    """The last status that an agent gave. `asked_at` and `answered_at` are monotonic seconds; the latter is None before any."""

    status: Mapping[str, Any]
    asked_at: float
    answered_at: float | None

    def silence(self, now: float) -> float:
        """Seconds since the last answer, or since the first question."""
        return now - (self.answered_at if self.answered_at is not None else self.asked_at)


class StatusPoller:
    """Keeps the newest answer of every agent. `scratch` names each node's folder, where `agent.json` tells the port."""

    def __init__(self, scratch: Mapping[str, Path], *, every: float = 0.5) -> None:
        self._scratch = dict(scratch)
        self._every = every
        self._answers: dict[str, Answer] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(node,), daemon=True, name=f"status {node}") for node in scratch
        ]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ask no more. Threads that wait for an answer end by themselves and are not waited for."""
        self._over.set()

    def answers(self) -> dict[str, Answer]:
        """The newest answer of each node that has been asked."""
        return dict(self._answers)

    def _ask_on(self, node: str) -> None:
        while not self._over.wait(self._every):
            now = time.monotonic()
            previous = self._answers.get(node) or Answer({}, now, None)
            note = folder.read_json(self._scratch[node] / "agent.json")
            status = ask(note.get("port")) if note else None
            self._answers[node] = previous if status is None else Answer(status, now, time.monotonic())


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

"""Polls the rendezvous and the generation's document in a background thread, so that a slow or
unreachable store never blocks the agent's monitor loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kdist_trainer import log
from kdist_trainer.agent.coordination import Document
from kdist_trainer.rendezvous.kubernetes_store import StoreRefusedError
from kdist_trainer.rendezvous.state import RendezvousStatus
from kdist_trainer.threads import OnError, start_thread


@dataclass(frozen=True)
class PollResult:
    """The state of the rendezvous, and the generation's document, which is read after it: an agent
    that leaves on purpose writes the document first.
    """

    status: RendezvousStatus = field(
        default_factory=lambda: RendezvousStatus(
            waiting=0, vacant=0, left=0, silent=0, closed=False
        )
    )
    document: Document = field(default_factory=dict)


def warn_of(error: Exception) -> None:
    """Log that the rendezvous cannot be read, or that the API server refuses it."""
    reason = error.__cause__ or error  # torch's own message does not say why
    if isinstance(reason, StoreRefusedError):
        message = f"the workers go on, and no other group can form after this one: {reason}"
        log.warn("rendezvous-refused", message=message)
    else:
        log.warn("rendezvous-unreachable", message=f"the rendezvous cannot be read: {reason}")


class RendezvousPoller:
    """Calls `source` every `seconds` within the `with` block. Calling the poller returns the latest
    result, or raises the error of the latest poll.
    """

    def __init__(self, source: Callable[[], PollResult], *, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._latest: PollResult | Exception = PollResult()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self) -> PollResult:
        latest = self._latest
        if isinstance(latest, Exception):
            raise latest
        return latest

    def __enter__(self) -> RendezvousPoller:
        self._thread = start_thread(
            self._poll_loop, name="kdist-rendezvous", on_error=OnError.RESTART
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()  # from here on only the agent's own thread uses the rendezvous

    def _poll_loop(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._latest = self._source()
            except Exception as error:  # noqa: BLE001 - raised in the thread that calls the poller
                self._latest = error

"""Polls the rendezvous and the generation's document in a background thread.

The store may be slow or unreachable; the agent's monitor loop reads the latest result and never
waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from kdist_trainer.agent.coordination import Document
from kdist_trainer.rendezvous.handler import RendezvousStatus


@dataclass(frozen=True)
class PollResult:
    """The state of the rendezvous, and the generation's document as read after it: an agent that
    leaves by plan writes the document first.
    """

    news: RendezvousStatus = field(
        default_factory=lambda: RendezvousStatus(waiting=0, left=0, silent=0, closed=False)
    )
    document: Document = field(default_factory=dict)


class RendezvousPoller:
    """Calls `source` every `seconds` within the `with` block; calling the poller returns the latest
    result or raises its error.
    """

    def __init__(self, source: Callable[[], PollResult], *, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._last: PollResult | Exception = PollResult()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kdist-rendezvous", daemon=True)

    def __call__(self) -> PollResult:
        last = self._last
        if isinstance(last, Exception):
            raise last
        return last

    def __enter__(self) -> RendezvousPoller:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()  # from here on the rendezvous is used by the agent alone

    def _listen(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._last = self._source()
            except Exception as error:  # noqa: BLE001 - handed on to whoever asks
                self._last = error

"""Hears what the others say, on a thread of its own: a store may be slow or away, and the agent must not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from kdist_trainer.agent.exchange import Document
from kdist_trainer.rendezvous.dynamic import News


@dataclass(frozen=True)
class Heard:
    """What the rendezvous says, and the generation's document as it was read after that: who leaves by plan says so first."""

    news: News = field(default_factory=lambda: News(waiting=0, left=0, silent=0, closed=False))
    document: Document = field(default_factory=dict)


class Hearing:
    """Asks `source` every `seconds` while the `with` block lasts; calling it gives the last answer, or raises its error."""

    def __init__(self, source: Callable[[], Heard], *, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._last: Heard | Exception = Heard()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kdist-hearing", daemon=True)

    def __call__(self) -> Heard:
        last = self._last
        if isinstance(last, Exception):
            raise last
        return last

    def __enter__(self) -> Hearing:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()  # from here on the rendezvous is used by the agent alone

    def _listen(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._last = self._source()
            except Exception as error:  # noqa: BLE001 - handed on to whoever asks
                self._last = error

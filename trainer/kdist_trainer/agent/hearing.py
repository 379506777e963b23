"""Hears what the rendezvous says, on a thread of its own: a store may be slow or away, and the agent must not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from kdist_trainer.rendezvous.dynamic import News

NOTHING = News(waiting=0, left=0, lost=0, closed=False)


class Hearing:
    """Asks `source` every `seconds` while the `with` block lasts; calling it gives the last answer, or raises its error."""

    def __init__(self, source: Callable[[], News], *, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._last: News | Exception = NOTHING
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kdist-hearing", daemon=True)

    def __call__(self) -> News:
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

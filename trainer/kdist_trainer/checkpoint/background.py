"""One piece of work at a time beside the training, on a thread of its own. Free of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs one function on a daemon thread: a process that ends by force does not wait for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: list[T] = []

    @property
    def busy(self) -> bool:
        """Whether something was started that has not yet ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether something was started whose result was not yet taken."""
        return self._thread is not None

    def start(self, work: Callable[[], T]) -> None:
        """Start `work`, which must not raise. The result of what was started before must have been taken."""

        def run() -> None:
            self._results.append(work())

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Wait for the end of what was started and return its result."""
        assert self._thread is not None  # noqa: S101 - asked for only while pending
        self._thread.join()
        self._thread = None
        return self._results.pop()

"""A function that runs while the training continues: `BackgroundTask`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Runs one function at a time on a daemon thread, which never delays the process's end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: list[T] = []

    @property
    def busy(self) -> bool:
        """Whether a function is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether a function was started whose result was not collected."""
        return self._thread is not None

    def start(self, work: Callable[[], T]) -> None:
        """Start `work`, which must not raise; the previous result must have been collected."""

        def run() -> None:
            self._results.append(work())

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def collect(self) -> T:
        """Wait for the function that was started and return its result."""
        assert self._thread is not None  # noqa: S101 - called only while pending
        self._thread.join()
        self._thread = None
        return self._results.pop()

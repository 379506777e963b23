"""A function that runs while the training continues: `BackgroundTask`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kdist_trainer.threads import OnError, start_thread

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Runs one function at a time on a daemon thread, which never delays the process's end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: list[T | BaseException] = []

    @property
    def busy(self) -> bool:
        """Whether a function is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pending(self) -> bool:
        """Whether a function was started whose result was not collected."""
        return self._thread is not None

    def start(self, work: Callable[[], T]) -> None:
        """Start `work`; the previous result must have been collected."""

        def run() -> None:
            try:
                self._results.append(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is collected
                self._results.append(error)

        self._thread = start_thread(run, name="checkpoint", on_error=OnError.REPORT)

    def wait(self, seconds: float) -> bool:
        """Wait so long at most for the function that was started; returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy

    def collect(self) -> T:
        """Wait for the function that was started; returns its result, or raises its error."""
        assert self._thread is not None  # noqa: S101 - called only while pending
        self._thread.join()
        self._thread = None
        result = self._results.pop()
        if isinstance(result, BaseException):
            raise result
        return result

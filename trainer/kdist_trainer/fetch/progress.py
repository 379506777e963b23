"""How far a fetch has come, and how long failed requests are repeated."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kdist_trainer import log
from kdist_trainer.errors import StorageError
from kdist_trainer.fetch.request import FetchRequest
from kdist_trainer.fetch.source import TransientError

REPORT_SECONDS: Final = 2.0
FIRST_WAIT_SECONDS: Final = 0.25
LONGEST_WAIT_SECONDS: Final = 30.0

T = TypeVar("T")


class FetchProgress:
    """Counts bytes and files. Safe to use from several threads.

    What counts as progress is what was never reached before: a file that ends at the same byte
    again and again makes none.
    """

    def __init__(self, request: FetchRequest) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._positions: dict[str, int] = {}
        self._highest: dict[str, int] = {}
        self._done = 0
        self._files_done = 0
        self._files = 0
        self._total: int | None = None
        self.advances = 0
        """Grows whenever there is progress."""
        self._reported: tuple[float, int] | None = None

    def begin(self, *, files: int, total: int | None) -> None:
        """Start to count again, with the number of files and bytes."""
        with self._lock:
            self._positions.clear()
            self._done = self._files_done = 0
            self._files, self._total = files, total
            self._reported = None

    def set_position(self, name: str, position: int) -> None:
        """Of a file, so many bytes have come."""
        with self._lock:
            self._done += position - self._positions.get(name, 0)
            self._positions[name] = position
            if position > self._highest.get(name, -1):
                self._highest[name] = position
                self.advances += 1

    def finish_file(self) -> None:
        """A file is complete."""
        with self._lock:
            self._files_done += 1

    @property
    def done_bytes(self) -> int:
        """The bytes that are there."""
        return self._done

    def report(self) -> None:
        """Log how far it is, unless that was done less than `REPORT_SECONDS` ago."""
        with self._lock:
            now, done = time.monotonic(), self._done
            before = self._reported or (now, done)
            if self._reported is not None and now - before[0] < REPORT_SECONDS:
                return
            is_first, self._reported = self._reported is None, (now, done)
            fields: dict[str, Any] = {
                "url": self._request.url,
                "field": self._request.field,
                "done_bytes": done,
                "total_bytes": self._total,
                "files_done": self._files_done,
                "files": self._files,
            }
        if not is_first:
            speed = max(0, round((done - before[1]) / (now - before[0])))
            log.event("data-progress", **fields, bytes_per_second=speed)


class FetchStopped(Exception):  # noqa: N818 - no error
    """Another file has failed for good: this one is given up."""


class RetryPolicy:
    """Repeats requests as long as the fetch makes progress."""

    def __init__(self, request: FetchRequest, progress: FetchProgress) -> None:
        self.request = request
        self.progress = progress
        self.stopped = threading.Event()

    def retry(self, call: Callable[[], T]) -> T:
        """Do it until it raises no `TransientError`. Raises what `Retries.wait` raises."""
        retries = Retries(self)
        while True:
            try:
                return call()
            except TransientError as error:
                retries.wait(self.request.url, error)


class Retries:
    """The failures of one call. They begin again whenever the fetch has made progress."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._advances = -1
        self._attempt = 0
        self._since = 0.0

    def wait(self, what: str, error: TransientError) -> None:
        """Wait before a request is repeated.

        Args:
            what: the file or URL.
            error: why the request failed.

        Raises:
            StorageError: there was no progress for too long.
            FetchStopped: the fetch has failed otherwise.
        """
        request, advances = self._policy.request, self._policy.progress.advances
        if advances != self._advances:
            self._advances, self._attempt, self._since = advances, 0, time.monotonic()
        self._attempt += 1
        stalled, allowed = time.monotonic() - self._since, request.stall_seconds
        if stalled >= allowed:
            raise StorageError(
                f"{request.field}: {what} cannot be fetched: {error}; nothing has come for "
                f"{stalled:.0f} s: start it again when the server works, what has come is kept"
            )
        longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(self._attempt - 1, 20))
        random_wait = longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load
        seconds = min(max(error.wait_seconds, random_wait), allowed - stalled + 0.01)
        log.warn(
            "data-retry",
            url=request.url,
            field=request.field,
            file=what,
            reason=str(error),
            seconds=round(seconds, 3),
        )
        if self._policy.stopped.wait(seconds):
            raise FetchStopped

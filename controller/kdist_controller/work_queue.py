"""The jobs that have to be looked at: each at most once at a time, those that failed again after a
pause that doubles.
"""

from __future__ import annotations

import heapq
import threading
import time
from typing import Final

from kdist_controller.resource import JobKey

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 300.0


class WorkQueue:
    """A queue of jobs for several threads. A job that is added while it is being worked on comes
    again when that is done.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due: dict[JobKey, float] = {}
        self._heap: list[tuple[float, JobKey]] = []
        self._working: set[JobKey] = set()
        self._added: dict[JobKey, float] = {}
        self._failures: dict[JobKey, int] = {}
        self._closed = False

    def add(self, key: JobKey, *, after: float = 0.0) -> None:
        """Have a job looked at in so many seconds, or earlier if that was asked for already."""
        due = time.monotonic() + after
        with self._condition:
            if key in self._working:
                self._added[key] = min(due, self._added.get(key, due))
            elif due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._heap, (due, key))
                self._condition.notify()

    def retry(self, key: JobKey) -> float:
        """Have a job looked at again after its failure; returns the seconds until then."""
        with self._condition:
            count = self._failures.get(key, 0)
            self._failures[key] = count + 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count, 32))
        self.add(key, after=pause)
        return pause

    def forgive(self, key: JobKey) -> None:
        """Forget the failures of a job."""
        with self._condition:
            self._failures.pop(key, None)

    def take(self) -> JobKey | None:
        """Wait for the next job; None once the queue is closed. `done` must follow."""
        with self._condition:
            while not self._closed:
                pause = self._next_pause()
                if pause is not None and pause <= 0:
                    _, key = heapq.heappop(self._heap)
                    del self._due[key]
                    self._working.add(key)
                    return key
                self._condition.wait(pause)
        return None

    def _next_pause(self) -> float | None:
        """Seconds until the next job is due; None if there is none."""
        while self._heap:
            due, key = self._heap[0]
            if self._due.get(key) == due:
                return due - time.monotonic()
            heapq.heappop(self._heap)  # asked for again, for an earlier time
        return None

    def done(self, key: JobKey) -> None:
        """The job that `take` returned has been looked at."""
        with self._condition:
            self._working.discard(key)
            due = self._added.pop(key, None)
        if due is not None:
            self.add(key, after=max(0.0, due - time.monotonic()))

    def close(self) -> None:
        """Let every `take` return None."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def __len__(self) -> int:
        """How many jobs are due."""
        now = time.monotonic()
        with self._condition:
            return sum(due <= now for due in self._due.values())

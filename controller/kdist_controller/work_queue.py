"""The jobs that are due: each is worked on by one thread at a time, and one that fails comes back
after a pause that doubles. Where a job may take long, its namespace gets a share of the threads
only.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import Counter, defaultdict
from typing import Final

from kdist_controller.resource import JobKey

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 300.0


class WorkQueue:
    """A queue of jobs for several threads. A job that is added while it is being worked on comes
    again when that is done.

    Args:
        share: threads that the jobs of one namespace may keep busy at the same time. Of the jobs
            that are due, those of the namespace that keeps the fewest busy come first.
    """

    def __init__(self, *, share: float = math.inf) -> None:
        self._share = share
        self._condition = threading.Condition()
        self._due: dict[JobKey, float] = {}
        self._heaps: dict[str, list[tuple[float, JobKey]]] = defaultdict(list)
        self._working: set[JobKey] = set()
        self._busy: Counter[str] = Counter()
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
                heapq.heappush(self._heaps[self._lane(key)], (due, key))
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
                pause, lane = self._next()
                if pause is not None and pause <= 0:
                    _, key = heapq.heappop(self._heaps[lane])
                    del self._due[key]
                    self._working.add(key)
                    self._busy[lane] += 1
                    return key
                self._condition.wait(pause)
        return None

    def _lane(self, key: JobKey) -> str:
        """Jobs of one lane share its threads; it is one for all where no share is set."""
        return "" if math.isinf(self._share) else key.namespace

    def _next(self) -> tuple[float | None, str]:
        """Seconds until the next job may be taken, and its lane; None if there is none."""
        now = time.monotonic()
        found: list[tuple[float, int, float, str]] = []
        for lane, heap in list(self._heaps.items()):
            while heap and self._due.get(heap[0][1]) != heap[0][0]:
                heapq.heappop(heap)  # asked for again, for an earlier time
            if not heap:
                del self._heaps[lane]
            elif self._busy[lane] < self._share:
                due = heap[0][0]
                found.append((max(due, now), self._busy[lane], due, lane))
        if not found:
            return None, ""
        due, _, _, lane = min(found)
        return due - now, lane

    def done(self, key: JobKey) -> None:
        """The job that `take` returned has been looked at."""
        lane = self._lane(key)
        with self._condition:
            self._working.discard(key)
            self._busy[lane] -= 1
            if not self._busy[lane]:
                del self._busy[lane]
            due = self._added.pop(key, None)
            if lane:
                self._condition.notify()  # its lane may have more to do
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

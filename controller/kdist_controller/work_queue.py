"""The jobs that are due: each is worked on by one thread at a time, and one that fails comes back
after a pause that doubles. Where a job may take long, its namespace gets a share of the threads
only.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final

from kdist.threads import OnError, start_thread
from kdist_controller.resource import JobKey

FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 300.0
_ERROR_PAUSE: Final = 10.0
_log = logging.getLogger(__name__)


class WorkQueue:
    """A queue of jobs for several threads. A job that is added while it is being worked on comes
    again when that is done. The jobs of one namespace keep at most `share` threads busy at the same
    time; of the jobs that are due, those of the namespace that keeps the fewest busy come first.
    """

    def __init__(self, *, share: float = math.inf) -> None:
        self._share = share
        self._condition = threading.Condition()
        self._due: dict[JobKey, float] = {}
        self._heaps: dict[str, list[tuple[float, JobKey]]] = defaultdict(list)
        self._working: dict[JobKey, float] = {}  # when each was taken
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

    def count_failure(self, key: JobKey) -> float:
        """Count a failure of the job; returns the seconds until it is tried again."""
        with self._condition:
            count = self._failures.get(key, 0)
            self._failures[key] = count + 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count, 32))

    def forgive(self, key: JobKey) -> None:
        with self._condition:
            self._failures.pop(key, None)

    def start(
        self, work: Callable[[JobKey], float | None], *, threads: int, name: str
    ) -> list[threading.Thread]:
        """Start threads that do `work` with each job that is due, until the queue is closed. `work`
        returns after how many seconds the job is due again, if it is.
        """

        def process() -> None:
            while (key := self.take()) is not None:
                try:
                    after = work(key)
                except Exception:  # noqa: BLE001 - one job must not end the thread of all others
                    after = _ERROR_PAUSE
                    words = "%s: thread pool %s: unexpected error; again in %.0f s"
                    _log.exception(words, key, name, after)
                finally:
                    self.done(key)
                if after is not None:
                    self.add(key, after=after)

        return [
            start_thread(process, name=f"{name}-{number}", on_error=OnError.RESTART)
            for number in range(threads)
        ]

    def longest(self) -> float:
        """Seconds since the first of the jobs that are being worked on was taken."""
        with self._condition:
            now = time.monotonic()
            return now - min(self._working.values(), default=now)

    def take(self) -> JobKey | None:
        """Wait for the next job; None once the queue is closed. `done` must follow."""
        with self._condition:
            while not self._closed:
                pause, lane = self._next()
                if pause is not None and pause <= 0:
                    _, key = heapq.heappop(self._heaps[lane])
                    del self._due[key]
                    self._working[key] = time.monotonic()
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
            self._working.pop(key, None)
            self._busy[lane] -= 1
            if not self._busy[lane]:
                del self._busy[lane]
            due = self._added.pop(key, None)
            if lane:
                self._condition.notify()  # its lane may have more to do
        if due is not None:
            self.add(key, after=max(0.0, due - time.monotonic()))

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def __len__(self) -> int:
        now = time.monotonic()
        with self._condition:
            return sum(due <= now for due in self._due.values())

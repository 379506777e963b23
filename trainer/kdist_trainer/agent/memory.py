"""Whether the kernel killed for want of memory: it counts its victims, and SIGKILL alone does not say who sent it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


RECENT_SECONDS = 10.0
"""How long a process may take to end that the kernel has killed: it counts first, and large memory is not freed at once."""
_LOOK_SECONDS = 1.0


class OomKills:
    """Watches the kernel's count. A kill of long ago explains no SIGKILL of today, so what counts is its growth of late."""

    def __init__(self, count: Callable[[], int] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._clock = count or count_oom_kills, clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), self._count())])

    def look(self) -> None:
        """Note the count, once a second however often it is called."""
        now = self._clock()
        if now - self._seen[-1][0] >= _LOOK_SECONDS:
            self._seen.append((now, self._count()))
            while len(self._seen) > 1 and self._seen[1][0] <= now - RECENT_SECONDS:
                self._seen.popleft()

    def recent(self) -> bool:
        """Whether the kernel has killed within the last seconds: since the newest look that is at least so long ago."""
        self.look()
        return self._count() > self._seen[0][1]


def count_oom_kills() -> int:
    """Processes killed for want of memory so far: in this control group, else on this machine, else 0."""
    for path in _counters():
        count = read_count(path)
        if count is not None:
            return count
    return 0


def read_count(path: Path) -> int | None:
    """The number after `oom_kill` in a counter file of the kernel; None if it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def _counters() -> Iterator[Path]:
    """Where the count may be, the closest first: cgroup v2, cgroup v1, the whole machine."""
    try:
        groups = [line.split(":", 2) for line in _SELF.read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, path in (group for group in groups if len(group) == 3):
        relative = path.lstrip("/")
        if not controllers:
            yield _ROOT / relative / "memory.events"
            yield _ROOT / "memory.events"  # inside a container the group may look like the root
        elif "memory" in controllers.split(","):
            yield _ROOT / "memory" / relative / "memory.oom_control"
            yield _ROOT / "memory" / "memory.oom_control"
    yield _MACHINE

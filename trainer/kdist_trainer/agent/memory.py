"""Whether the kernel killed for want of memory: it counts its victims, and SIGKILL alone does not say who sent it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")


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

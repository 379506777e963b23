"""What processes hold and use, as the kernel tells it in /proc: descriptors, threads, memory, and
CPU by the name of the thread.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Where the text after the name in `/proc/PID/task/TID/stat` has the thread's ticks."""


class Usage(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    shared_memory: int
    """Mappings of files in /dev/shm."""
    private_kib: int
    """Memory that nobody shares and no file backs."""


def count(pid: int) -> Usage:
    """What a process holds. Raises `OSError` if it has ended."""
    process = Path("/proc") / str(pid)
    rollup = (process / "smaps_rollup").read_text().splitlines()
    return Usage(
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        (process / "maps").read_text().count(" /dev/shm/"),
        next(int(line.split()[1]) for line in rollup if line.startswith("Pss_Anon:")),
    )


class ThreadTimes:
    """CPU seconds of threads by their name, summed over processes. Threads that have ended since
    the last `read` keep what they had then.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int, int], float] = {}

    def read(self, pids: Iterable[int]) -> Counter[str]:
        """The seconds by name so far, of these processes and those of earlier calls."""
        for pid in pids:
            with suppress(OSError):  # it has ended
                for task in (Path("/proc") / str(pid) / "task").iterdir():
                    with suppress(OSError):
                        name, _, rest = (
                            (task / "stat").read_text().partition("(")[2].rpartition(")")
                        )
                        fields = rest.split()
                        ticks = int(fields[_USER]) + int(fields[_SYSTEM])
                        self._seconds[name, pid, int(task.name)] = ticks * _TICK_SECONDS
        found: Counter[str] = Counter()
        for (name, _, _), seconds in self._seconds.items():
            found[name] += seconds  # type: ignore[assignment]  # a Counter of floats
        return found

"""What the threads of this process do that Python knows nothing of, as the kernel tells it. Linux
only: elsewhere, and where a sandbox hides it, nothing is known.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_CONDITION_BYTES = 48
"""Size of a condition variable of glibc's, which waits at one of several words in it."""
_ADDRESS, _TIMEOUT = 1, 4
"""Where a line of `/proc/PID/task/TID/syscall` has the arguments of futex(2)."""


def thread_ids() -> set[int]:
    """The ids of all threads of this process; empty where the system has no list."""
    with suppress(OSError):
        return {int(entry.name) for entry in _THREADS.iterdir()}
    return set()


def select_named(threads: Collection[int], name: str) -> set[int]:
    """Those of the threads that live and have this name, which the kernel cuts at 15 characters."""
    found = set()
    for thread in threads:
        with suppress(OSError):
            if (_THREADS / str(thread) / "comm").read_text().strip() == name[:15]:
                found.add(thread)
    return found


def wait_together(threads: Collection[int]) -> bool:
    """Whether these threads, two or more, all wait at one condition variable without a time-out, as
    threads do that have no work. False if it is not known.
    """
    addresses, calls = [], set()
    for thread in threads:
        try:
            fields = (_THREADS / str(thread) / "syscall").read_text().split()
            address, timeout = int(fields[_ADDRESS], 16), int(fields[_TIMEOUT], 16)
        except (OSError, ValueError, IndexError):  # it runs, or the system does not tell
            return False
        if timeout:
            return False
        addresses.append(address)
        calls.add(fields[0])
    is_one_place = len(addresses) > 1 and max(addresses) - min(addresses) < _CONDITION_BYTES
    return is_one_place and len(calls) == 1

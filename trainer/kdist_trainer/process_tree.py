"""The processes below this one, however deep: found in the system's process table, and killed with
all that they started.

A process group is not enough: a child may lead a session of its own, and a daemon has no parent any
more. On Linux a process can become the parent of every orphan below it, and so loses sight of none;
elsewhere only those are found whose line of parents is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.005


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    dead: bool
    """Whether it has ended, and only waits for its parent to be told."""


def adopt() -> bool:
    """Become the parent of all orphans below this process; False where the system cannot do
    that.
    """
    return _control(_SET_CHILD_SUBREAPER, 1)


def wake_without_parent() -> bool:
    """Have the kernel continue this process, should it be stopped, when the thread that started it
    ends.

    Returns False where the system cannot do that.
    """
    return _control(_SET_PDEATHSIG, signal.SIGCONT)


def _control(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def find(*, keep: Collection[int] = (), below: Collection[int] | None = None) -> list[int]:
    """Pids of the living below this process, without those in `keep`, whose own children count all
    the same.

    With `below` only these processes and all below them count.
    """
    table = _read_table()
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found = (
        list(children.get(os.getpid(), ()))
        if below is None
        else [process for process in table if process.pid in below]
    )
    for process in found:  # which grows while it is gone through
        found.extend(children.get(process.pid, ()))
    return [process.pid for process in found if not process.dead and process.pid not in keep]


def find_children() -> list[int]:
    """Pids of this process's own children, of those as well that have ended and were not waited
    for.
    """
    return [process.pid for process in _read_table() if process.parent == os.getpid()]


def kill(
    *, keep: Collection[int] = (), below: Collection[int] | None = None, seconds: float = 2.0
) -> list[int]:
    """Kill what `find` finds until it finds no more; returns the pids that are there even after so
    many seconds.
    """
    adopt()  # what loses its parent on the way is found as well
    deadline = time.monotonic() + seconds
    while found := find(keep=keep, below=below):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return found
        time.sleep(_LOOK_SECONDS)
    return []


def _read_table() -> list[Process]:
    if not _PROC.exists():
        return _ask_ps()
    return [
        process
        for entry in os.scandir("/proc")
        if entry.name.isdigit() and (process := _read(entry.name))
    ]


_PROC = Path("/proc/self/stat")


def _read(pid: str) -> Process | None:
    try:
        fields = Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()
        return Process(int(pid), int(fields[1]), fields[0] in (b"Z", b"X"))
    except (OSError, ValueError, IndexError):
        return None  # it has gone meanwhile


def _ask_ps() -> list[Process]:
    """The table where the kernel does not show it as files."""
    try:
        with subprocess.Popen(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], stdout=subprocess.PIPE, text=True
        ) as ps:
            lines = [line.split() for line in ps.communicate()[0].splitlines()]
    except OSError:
        return []
    found = [
        Process(int(line[0]), int(line[1]), line[2].startswith("Z"))
        for line in lines
        if len(line) >= 3
    ]
    return [process for process in found if process.pid != ps.pid]

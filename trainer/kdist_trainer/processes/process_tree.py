"""Finds and kills all descendants of this process, by the system's process table.

A process group is not enough: a child may lead its own session, and a daemon has lost its parent.
On Linux a process can become the parent of every orphan below it (a subreaper, see prctl(2)) and so
finds all of them; on other systems it finds only those whose ancestors are all alive.
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

from kdist_trainer.processes.descriptors import EXHAUSTED, spend

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.005
_STAT_BYTES = 4096


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    dead: bool
    """Whether it has exited and its parent has not waited for it yet."""


def adopt() -> bool:
    """Become the parent of all orphans below this process; returns False if the system cannot."""
    return _control(_SET_CHILD_SUBREAPER, 1)


def wake_without_parent() -> bool:
    """Have the kernel continue this process, if it is stopped, when the thread that started it
    exits; returns False if the system cannot.
    """
    return _control(_SET_PDEATHSIG, signal.SIGCONT)


def _control(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def find(
    *,
    keep: Collection[int] = (),
    spared: Collection[int] = (),
    below: Collection[int] | None = None,
) -> list[int]:
    """Find the running processes below this one; returns their pids.

    Args:
        keep: Pids that are left out; their own children are not.
        spared: Pids that are left out with all that is below them.
        below: Search below these pids only, and include them.
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
    for process in found:  # grows during the loop
        if process.pid not in spared:
            found.extend(children.get(process.pid, ()))
    left_out = {*keep, *spared}
    return [process.pid for process in found if not process.dead and process.pid not in left_out]


def find_children() -> list[int]:
    """The pids of this process's own children, including those that have exited and were not waited
    for.
    """
    return [process.pid for process in _read_table() if process.parent == os.getpid()]


def kill(
    *,
    keep: Collection[int] = (),
    spared: Collection[int] = (),
    below: Collection[int] | None = None,
    seconds: float = 2.0,
) -> list[int]:
    """Kill all processes that `find` finds, until it finds none, for so many seconds at most;
    returns the pids that still run then.
    """
    adopt()  # to find those that lose their parent meanwhile
    deadline = time.monotonic() + seconds
    while found := find(keep=keep, spared=spared, below=below):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return found
        time.sleep(_POLL_SECONDS)
    return []


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False if the system does not report
    it.
    """
    try:
        stat = spend(lambda: Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in {"T", "t"}


def _read_table() -> list[Process]:
    if not _PROC.exists():
        return _read_ps()
    return [
        process
        for path in spend(lambda: [*Path("/proc").iterdir()])
        if path.name.isdigit() and (process := _read(path.name)) is not None
    ]


_PROC = Path("/proc/self/stat")


def _read(pid: str) -> Process | None:
    # a recovery reads the table several times: this takes half as long as pathlib
    try:
        descriptor = spend(lambda: os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise  # a process that cannot be read is not gone
        return None  # it has exited meanwhile
    try:
        fields = os.read(descriptor, _STAT_BYTES).rpartition(b")")[2].split(None, 2)
        return Process(int(pid), int(fields[1]), fields[0] in (b"Z", b"X"))
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(descriptor)


def _read_ps() -> list[Process]:
    """The process table on systems without /proc."""
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


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where the system does not tell."""
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return False
    mask = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "0:0")
    return bool(int(mask.partition(":")[2], 16) >> (number - 1) & 1)


def age_seconds() -> float:
    """How long ago this process started; 0 where the system does not tell."""
    try:
        # the name of the program, which may contain anything, ends at the last parenthesis
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0

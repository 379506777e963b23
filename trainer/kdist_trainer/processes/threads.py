"""Threads of this process: those that it starts, none of which ends silently, and what native
threads wait for, as the kernel shows it.

What a thread raises is logged, and then it starts again, ends the process, or is reported to be
missing. Native threads are known on Linux only, and not where a sandbox hides them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from kdist_trainer import log

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 5.0
_SHOWN_LINES = 12
_START_SECONDS, _RETRY_SECONDS = 10.0, 0.1


class OnError(StrEnum):
    """What follows when a thread's function raises."""

    RESTART = "it starts again"
    """The function is called again after a pause: for a loop on which a training or its supervision
    depends.
    """
    EXIT = "the process ends"
    """For a thread that the process cannot do without, and whose function cannot be repeated."""
    REPORT = "nothing else ends"
    """For a thread that a training can do without, or whose caller hears of the error."""


def start_thread(run: Callable[[], object], *, name: str, on_error: OnError) -> threading.Thread:
    """Call `run` in a daemon thread.

    Args:
        run: The function; a loop that may be restarted returns when it is told to stop.
        name: The name of the thread, which the log shows.
        on_error: What follows when `run` raises.

    Returns:
        The thread, which has started.

    Raises:
        RuntimeError: If the system has had no thread left for a while.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        thread = threading.Thread(target=_run, args=(run, name, on_error), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is left: the script, or a neighbour, has them
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return thread


def _run(run: Callable[[], object], name: str, on_error: OnError) -> None:
    pause = _FIRST_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - also SystemExit, which a thread hides
            with contextlib.suppress(Exception):  # memory may be used up: it goes on without a line
                _report(error, name, on_error)
            if on_error is OnError.EXIT:
                os._exit(1)
            if on_error is OnError.REPORT:
                return
        else:
            return
        if time.monotonic() - started > 2 * _MAX_PAUSE_SECONDS:
            pause = _FIRST_PAUSE_SECONDS
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def _report(error: BaseException, name: str, on_error: OnError) -> None:
    lines = "".join(traceback.format_exception(error)).splitlines()
    log.error(
        "thread-failed",
        thread=name,
        error=f"{type(error).__name__}: {error}",
        then=on_error.name.lower(),
        traceback=lines[-_SHOWN_LINES:],
        message=f"thread {name} has failed, {on_error}: {type(error).__name__}: {error}",
    )


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

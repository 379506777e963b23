"""Starts threads, none of which ends in silence: what a thread raises is logged, and then it starts
again, ends the process, or is reported to be missing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from enum import StrEnum

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

"""Starts threads, none of which ends in silence: what a thread raises is logged, and then it starts
again, ends the process, or is reported to be missing.

The trainer has its own (`kdist_trainer.processes.threads`), which writes events: neither package
may import the other here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 5.0


class OnError(StrEnum):
    """What follows when a thread's function raises."""

    RESTART = "it starts again"
    """The function is called again after a pause: for a loop that others rely on."""
    EXIT = "the process ends"
    """For a thread that the process cannot do without, and whose function cannot be repeated."""
    REPORT = "the rest goes on"
    """For a thread that is started again when it is needed, or that others can do without."""


def start_thread(run: Callable[[], object], *, name: str, on_error: OnError) -> threading.Thread:
    """Call `run` in a daemon thread, which is returned.

    Args:
        run: the function; a loop that may be restarted returns when it is told to stop.
        name: name of the thread, which the log shows.
        on_error: what follows when `run` raises.
    """
    thread = threading.Thread(target=_run, args=(run, name, on_error), name=name, daemon=True)
    thread.start()
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
    import logging  # most commands never need it

    logger = logging.getLogger(__name__)
    # without a handler, as in a command, the line goes to standard error, without the traceback
    logger.error(
        "thread %s has failed, %s: %s: %s",
        name,
        on_error,
        type(error).__name__,
        ascii(str(error)),  # it may be foreign text, and a terminal obeys control characters
        exc_info=error if logging.getLogger().handlers else None,
    )

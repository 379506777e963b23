"""What follows when a thread's function raises. Without logging: kdist and its controller import
this too, and each has a report of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 5.0


class OnError(StrEnum):
    """What follows when a thread's function raises."""

    RESTART = "it starts again"
    """The function is called again after a pause: for a loop that others rely on."""
    EXIT = "the process ends"
    """For a thread that the process cannot do without, and whose function cannot be repeated."""
    REPORT = "the rest goes on"
    """For one that is not needed, or is started again, or whose caller hears of the error."""


def call(
    run: Callable[[], object],
    name: str,
    on_error: OnError,
    report: Callable[[BaseException, str, OnError], None],
) -> None:
    """Call `run` in the thread of this name; an error is reported before `on_error` follows."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - also SystemExit, which a thread hides
            with suppress(Exception):  # memory may be used up: it goes on without a line
                report(error, name, on_error)
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

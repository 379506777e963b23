"""Starts threads, none of which ends in silence: what a thread raises is logged, and then it starts
again, ends the process, or is reported to be missing.

The trainer has its own (`kdist_trainer.processes.threads`), which writes events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kdist_trainer.processes.thread_errors import OnError, call


def start_thread(run: Callable[[], object], *, name: str, on_error: OnError) -> threading.Thread:
    """Call `run` in a daemon thread, which is returned.

    Args:
        run: the function; a loop that may be restarted returns when it is told to stop.
        name: name of the thread, which the log shows.
        on_error: what follows when `run` raises.
    """
    told = (run, name, on_error, _report)
    thread = threading.Thread(target=call, args=told, name=name, daemon=True)
    thread.start()
    return thread


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

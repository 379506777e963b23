"""Waits for any condition, up to a timeout whose error names it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kdist.errors import Code, KdistError

T = TypeVar("T")

INTERVAL = 0.5
"""Seconds between two polls of a condition."""
_NOTIFY_AFTER = 5.0  # seconds


def wait_until(
    poll: Callable[[], T | None],
    *,
    timeout: float,
    what: str,
    notify: Callable[[str], None],
    hint: str = "",
    next_command: str = "",
) -> T:
    """Poll a condition until it is met.

    Args:
        poll: returns None as long as it is not.
        timeout: in seconds.
        what: the condition, for messages.
        notify: is called once if it takes long.
        hint: of the error.
        next_command: of the error.

    Returns:
        What `poll` returned.

    Raises:
        KdistError: the condition was not met in time (TIMEOUT).
    """
    began = time.monotonic()
    notified = False
    while True:
        found = poll()
        if found is not None:
            return found
        waited = time.monotonic() - began
        if waited > timeout:
            raise KdistError(
                f"{what}: not within {timeout:.0f} s",
                hint=hint,
                next_command=next_command,
                code=Code.TIMEOUT,
            )
        if not notified and waited > _NOTIFY_AFTER:
            notified = True
            notify(f"waiting: {what} …")
        time.sleep(INTERVAL)

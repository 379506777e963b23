"""SIGTERM and SIGINT to the agent: noted, and only where the agent waits for others are they an
exception.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(Exception):  # noqa: N818 - a request is no error
    """The agent was asked to stop while it waited for something that may never come."""


def stop_margin(grace_seconds: float) -> float:
    """Seconds of the grace that the agent keeps for itself: to kill what is left, and to end."""
    return min(5.0, max(0.5, grace_seconds / 10))


class StopSignals:
    """Whether somebody asked this agent to stop, since when (monotonic), and whether they asked
    twice.
    """

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.urgent = False
        self._interrupting = False

    def install(self) -> None:
        """Take over both signals. Main thread only."""
        signal.signal(signal.SIGTERM, self._take)
        signal.signal(signal.SIGINT, self._take)

    @property
    def requested(self) -> bool:
        return self.requested_at is not None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside the block a request raises `StopRequested`, also one that came before."""
        self._interrupting = True
        try:
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._interrupting = False

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            self.urgent = True
        else:
            self.requested_at = time.monotonic()
        if self._interrupting:
            self._interrupting = False
            raise StopRequested

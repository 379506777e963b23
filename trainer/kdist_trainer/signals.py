"""SIGTERM and SIGINT to the agent: they are recorded, and raise an exception only while the agent
waits for other nodes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(Exception):  # noqa: N818 - a request is not an error
    """The agent was asked to stop while it waited for other nodes."""


def stop_margin(grace_seconds: float) -> float:
    """The seconds of the grace period that the agent reserves to kill its workers and to exit."""
    return min(5.0, max(0.5, grace_seconds / 10))


class StopSignals:
    """The requests to stop this agent.

    Attributes:
        requested_at: The monotonic time of the first request; None before it.
        urgent: Whether there was a second one.
    """

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.urgent = False
        self._interrupting = False

    def install(self) -> None:
        """Install the handlers of both signals. Main thread only."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    @property
    def requested(self) -> bool:
        """Whether the agent was asked to stop."""
        return self.requested_at is not None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise `StopRequested` inside the block for a request, also for an earlier one."""
        self._interrupting = True
        try:
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._interrupting = False

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            self.urgent = True
        else:
            self.requested_at = time.monotonic()
        if self._interrupting:
            self._interrupting = False
            raise StopRequested

"""SIGTERM and SIGINT: what a second one means, which processes leave them to others, and how the
agent takes them: they are recorded, and raise an exception only while it waits for other nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from kdist_trainer.formats import SAME_REQUEST_SECONDS


class StopCounter:
    """Counts requests to stop, of which a process may get several signals each."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        """The monotonic time of the first request; None before it."""

    def add(self) -> bool:
        """Note that a signal has come; returns whether it is a second request."""
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
        return now - self.first_at > SAME_REQUEST_SECONDS


def signal_name(code: int) -> str | None:
    """The name of the signal that a negative exit code stands for, else None."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


_stopped_at: float | None = None


def leave_stops_to_others() -> None:
    """Have this process go on at SIGTERM, since others need it to save; it ends with them. What it
    forks has the default again. Main thread only.
    """
    signal.signal(signal.SIGTERM, _go_on)
    os.register_at_fork(after_in_child=_restore_default)


def exit_on_unrequested_sigterm() -> None:
    """End by a SIGTERM that this process was left to others by, and of which they say nothing: it
    was meant for this process alone. Main thread only.
    """
    if _stopped_at is not None and time.monotonic() - _stopped_at > SAME_REQUEST_SECONDS:
        _restore_default()
        signal.raise_signal(signal.SIGTERM)


def _go_on(_number: int, _frame: FrameType | None) -> None:
    global _stopped_at
    _stopped_at = _stopped_at or time.monotonic()


def _restore_default() -> None:
    global _stopped_at
    _stopped_at = None
    if signal.getsignal(signal.SIGTERM) is _go_on:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopRequested(Exception):  # noqa: N818 - a request is not an error
    """The agent was asked to stop while it waited for other nodes."""


_EXIT_SHARE: Final = 0.1
_LEAST_EXIT: Final = 0.5
_MOST_EXIT: Final = 5.0


def kill_deadline(since: float, grace_seconds: float) -> float:
    """When a grace period that began at `since` ends for the agent's own waiting: the rest is
    reserved to kill the workers and to exit.
    """
    return since + grace_seconds - min(_MOST_EXIT, max(_LEAST_EXIT, grace_seconds * _EXIT_SHARE))


class StopSignals:
    """The requests to stop this agent.

    Attributes:
        requested_at: The monotonic time of the first request; None before it.
        urgent: Whether there was a second one (`StopCounter`).
    """

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.urgent = False
        self._requests = StopCounter()
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
        self.urgent |= self._requests.add()
        self.requested_at = self._requests.first_at
        if self._interrupting:
            self._interrupting = False
            raise StopRequested

"""Signals as things to look at between two rounds of a loop: what somebody asked for, and that a child has ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While the `with` block lasts, signals are counted instead of ending the process. For the main thread only."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __enter__(self) -> Interrupts:
        for number in REQUESTS:
            # nohup keeps its promise: a signal that the caller has us ignore stays ignored
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._note)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _only_wake)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until the next signal; the end of a child is one."""
        select.select([self._reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's signature
        self.received.append(signal.Signals(number))


def _only_wake(number: int, frame: FrameType | None) -> None:
    """SIGCHLD needs a handler to reach the wake-up file; whoever waits for the child learns the rest."""

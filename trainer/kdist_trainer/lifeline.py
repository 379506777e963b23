"""The lifeline: a named pipe whose only writer is its owner, so that its end of file says that the owner is gone.

`kdist run` holds one for its agents and each agent one for its ranks. Whoever watches kills all processes below it and its
process group when the owner dies, however it dies. It works where PDEATHSIG does not: for ranks, whose parent is the forkserver
and not the agent, and on macOS. A process that is stopped cannot watch: the kernel continues it when its parent ends.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kdist_trainer import descendants


class Lifeline:
    """The owner's end. Keep it referenced for as long as the watchers may live."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def create(cls, path: Path) -> Lifeline:
        """Make the pipe at `path`, replacing a dead owner's. Raises `OSError`."""
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # A writer can only open where a reader is, so be one for a moment. Both ends are closed on exec, as Python's are.
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        finally:
            os.close(reader)
        return cls(path, writer)

    def close(self) -> None:
        """Let go: every watcher ends its process group now. Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def end_family() -> None:
    """Kill all processes below this one, also those that left its group, then its group, this process included."""
    try:
        descendants.kill()
    finally:
        os.killpg(0, signal.SIGKILL)


def watch(path: Path, on_end: Callable[[], None] = end_family) -> threading.Thread:
    """Call `on_end` from a daemon thread when the owner of the lifeline at `path` is gone, or was never there.

    The thread sleeps in the kernel and costs nothing. The default ends all below the caller and its process group, which it
    therefore must not share with anybody else.
    """
    descendants.wake_without_parent()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # now: a moment later it might be a successor's
    except OSError:
        descriptor = None
    thread = threading.Thread(target=_wait, args=(descriptor, on_end), name="lifeline", daemon=True)
    thread.start()
    return thread


def _wait(descriptor: int | None, on_end: Callable[[], None]) -> None:
    if descriptor is None:
        on_end()
        return
    try:
        try:
            alive = bool(os.read(descriptor, 1))
        except BlockingIOError:
            alive = True  # nothing to read, but somebody holds the other end
        while alive:
            os.set_blocking(descriptor, True)
            alive = bool(os.read(descriptor, 1))
    except OSError:
        pass
    finally:
        os.close(descriptor)
    on_end()

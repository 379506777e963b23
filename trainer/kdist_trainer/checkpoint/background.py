"""Functions that run while the training continues: `BackgroundTask` and `OnDemandThread`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from kdist_trainer.threads import OnError, start_thread

T = TypeVar("T")
_MAX_FREE: Final = 4


class _ReusableThread:
    """A daemon thread that calls one function after another.

    Linux schedules a new thread behind those that run, which takes milliseconds on a busy machine,
    and one that wakes up ahead of them; a recovery calls storage a dozen times. The threads of
    `concurrent.futures` would keep the process from ending while a call hangs.
    """

    free: Final[list[_ReusableThread]] = []
    """Those that have nothing to do."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._given = SimpleQueue[tuple[Callable[[], None], threading.Event]]()
        start_thread(self._run, name="background", on_error=OnError.REPORT)

    @classmethod
    def start(cls, work: Callable[[], None]) -> threading.Event:
        """Call `work`, which raises nothing, on a free thread or else on a new one; returns an
        event that is set once it has ended.
        """
        thread, ended = None, threading.Event()
        while thread is None or thread._process != os.getpid():  # a fork has none of the threads
            try:
                thread = cls.free.pop()
            except IndexError:
                thread = cls()
        thread._given.put((work, ended))
        return ended

    def _run(self) -> None:
        is_kept = True
        while is_kept:
            work, ended = self._given.get()
            try:
                work()
            finally:
                is_kept = len(self.free) < _MAX_FREE
                if is_kept:  # first: whoever waits for the end may give the next function
                    self.free.append(self)
                ended.set()
            del work, ended  # while it waits it must not keep what the function refers to


class BackgroundTask(Generic[T]):
    """Runs one function at a time on a daemon thread, which never delays the process's end."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None
        self._results: list[T | BaseException] = []

    @property
    def busy(self) -> bool:
        """Whether a function is running."""
        return self._ended is not None and not self._ended.is_set()

    @property
    def pending(self) -> bool:
        """Whether a function was started whose result was not collected."""
        return self._ended is not None

    def start(self, work: Callable[[], T]) -> None:
        """Start `work`; the previous result must have been collected."""

        def run() -> None:
            try:
                self._results.append(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is collected
                self._results.append(error)

        self._ended = _ReusableThread.start(run)

    def wait(self, seconds: float) -> bool:
        """Wait so long at most for the function that was started; returns whether it has ended."""
        return self._ended is None or self._ended.wait(seconds)

    def collect(self) -> T:
        """Wait for the function that was started; returns its result, or raises its error."""
        assert self._ended is not None  # noqa: S101 - called only while pending
        self._ended.wait()
        self._ended = None
        result = self._results.pop()
        if isinstance(result, BaseException):
            raise result
        return result


class OnDemandThread:
    """Calls one function on a thread of its own whenever it is asked to; several times that it is
    asked meanwhile count as one. The thread begins when it is first asked.
    """

    def __init__(self, name: str, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Do nothing yet.

        Args:
            name: of the thread.
            work: called whenever it is asked to; raises nothing.
            end: called on the thread at its end.
        """
        self._name, self._work, self._end = name, work, end
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Have the function called, soon."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            if self._thread is None:
                self._thread = start_thread(self._run, name=self._name, on_error=OnError.REPORT)

    def wait(self, seconds: float | None) -> bool:
        """Wait so long at most, or without an end, until what was asked so far is done; returns
        whether it is.
        """
        with self._changed:
            asked = self._asked
            return self._changed.wait_for(lambda: self._done >= asked, seconds)

    def end(self, seconds: float) -> None:
        """Have the thread end after what was asked so far, and wait so long at most for it."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._thread is not own)
                asked = self._asked
                if asked == self._done or self._thread not in (None, own):
                    break  # it was to end, or another one goes on in its place
            self._work()
            with self._changed:
                self._done = max(self._done, asked)
                self._changed.notify_all()
        self._end()

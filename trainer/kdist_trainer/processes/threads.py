"""Threads of this process: those that it starts, none of which ends silently, and what native
threads wait for, as the kernel shows it.

What a thread raises is logged, and then it starts again, ends the process, or is reported to be
missing. Native threads are known on Linux only, and not where a sandbox hides them.

`BoundedCalls` calls storage in a thread of its own and waits for seconds only: a file system that
has stopped answering blocks its caller for minutes or for ever, and the client of an object store
retries for a minute.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from kdist_trainer import log
from kdist_trainer.processes.thread_errors import OnError, call

T = TypeVar("T")

_SHOWN_LINES = 12
_START_SECONDS, _RETRY_SECONDS = 10.0, 0.1


def start_thread(run: Callable[[], object], *, name: str, on_error: OnError) -> threading.Thread:
    """Call `run` in a daemon thread; returns the thread, which has started.

    Args:
        run: The function; a loop that may be restarted returns when it is told to stop.
        name: The name of the thread, which the log shows.
        on_error: What follows when `run` raises.

    Raises:
        RuntimeError: If the system has had no thread left for a while.
    """
    deadline = time.monotonic() + _START_SECONDS
    told = (run, name, on_error, _report)
    while True:
        thread = threading.Thread(target=call, args=told, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is left: the script, or a neighbour, has them
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return thread


def _report(error: BaseException, name: str, on_error: OnError) -> None:
    lines = "".join(traceback.format_exception(error)).splitlines()
    log.error(
        "thread-failed",
        thread=name,
        error=f"{type(error).__name__}: {error}",
        then=on_error.name.lower(),
        traceback=lines[-_SHOWN_LINES:],
        message=f"thread {name} has failed, {on_error}: {type(error).__name__}: {error}",
    )


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
        """Do nothing yet. `work`, which raises nothing, is called on the thread whenever it is
        asked to, and `end` at its end.
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


ANSWER_SECONDS: Final = 5.0
"""How long a call may take. Much more than storage needs that is well; less than what a group that
waits costs.
"""


class BoundedCalls:
    """Calls one function at a time, from one thread."""

    def __init__(self, description: str, *, seconds: float = ANSWER_SECONDS) -> None:
        """Call nothing yet. A call may take `seconds` at most; `description` is of what is called,
        for the error.
        """
        self._description = description
        self._seconds = seconds
        self._task = BackgroundTask[Any]()

    @property
    def has_answered(self) -> bool:
        """Whether a call that was not waited for has ended since."""
        return self._task.pending and not self._task.busy

    def call(self, work: Callable[[], T]) -> T:
        """The result of `work`. One that takes too long goes on, and until it has ended no other
        call is begun.

        Raises:
            TimeoutError: it takes too long, or an earlier call does.
            Exception: what `work` raises.
        """
        if self._task.pending:
            if self._task.busy:
                raise self._refusal()
            with suppress(Exception):  # of a call that nobody waits for any more
                self._task.collect()
        return self.resume(work)

    def resume(self, work: Callable[[], T]) -> T:
        """The result of the earlier call of `work` that took too long; without one it is called.
        Raises as `call` does.
        """
        seconds = 0.0
        if not self._task.pending:
            seconds = self._seconds
            self._task.start(work)
        if not self._task.wait(seconds):
            raise self._refusal()
        result: T = self._task.collect()
        return result

    def _refusal(self) -> TimeoutError:
        return TimeoutError(f"{self._description} does not answer")


_THREADS = Path("/proc/self/task")
_CONDITION_BYTES = 48
"""Size of a condition variable of glibc's, which waits at one of several words in it."""
_ADDRESS, _TIMEOUT = 1, 4
"""Where a line of `/proc/PID/task/TID/syscall` has the arguments of futex(2)."""


def thread_ids() -> set[int]:
    """The ids of all threads of this process; empty where the system has no list."""
    with suppress(OSError):
        return {int(entry.name) for entry in _THREADS.iterdir()}
    return set()


def select_named(threads: Collection[int], name: str) -> set[int]:
    """Those of the threads that live and have this name, which the kernel cuts at 15 characters."""
    found = set()
    for thread in threads:
        with suppress(OSError):
            if (_THREADS / str(thread) / "comm").read_text().strip() == name[:15]:
                found.add(thread)
    return found


def wait_together(threads: Collection[int]) -> bool:
    """Whether these threads, two or more, all wait at one condition variable without a time-out, as
    threads do that have no work. False if it is not known.
    """
    addresses, calls = [], set()
    for thread in threads:
        try:
            fields = (_THREADS / str(thread) / "syscall").read_text().split()
            address, timeout = int(fields[_ADDRESS], 16), int(fields[_TIMEOUT], 16)
        except (OSError, ValueError, IndexError):  # it runs, or the system does not tell
            return False
        if timeout:
            return False
        addresses.append(address)
        calls.add(fields[0])
    is_one_place = len(addresses) > 1 and max(addresses) - min(addresses) < _CONDITION_BYTES
    return is_one_place and len(calls) == 1

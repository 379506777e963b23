"""Calls to storage that nobody waits for longer than a few seconds: `BoundedCalls`.

A file system that has stopped answering keeps whoever calls it, for minutes or for ever, and an
object store that is away is asked again for a minute. What goes on without an answer therefore
calls in a thread of its own. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from kdist_trainer.checkpoint.group import BackgroundTask

T = TypeVar("T")
ANSWER_SECONDS: Final = 5.0
"""How long a call may take. Much more than storage needs that is well; less than what a group that
waits costs.
"""


class BoundedCalls:
    """Calls one function at a time, from one thread."""

    def __init__(self, what: str, *, seconds: float = ANSWER_SECONDS) -> None:
        """Call nothing yet.

        Args:
            what: what is called, for the error.
            seconds: how long a call may take.
        """
        self._what = what
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
        return TimeoutError(f"{self._what} does not answer")

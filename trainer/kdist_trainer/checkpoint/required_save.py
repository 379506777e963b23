"""A save that must succeed, and what the ranks do while the storage refuses it: `RequiredSave`.

Before a stop there is time for two attempts. The last save of a training is tried for longer: the
ranks hold what is finished, and otherwise it would be computed again, for the same storage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kdist_trainer import log
from kdist_trainer.checkpoint.bounded_calls import BoundedCalls
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.errors import PeersLostError, StorageError

LONGEST_SECONDS: Final = 3600.0
"""How long the ranks hold a finished training for its last save. A run that saves by `auto` has at
most an hour between two saves: to compute that again takes no longer than this wait.
"""
_FIRST_PAUSE: Final = 20.0
_LONGEST_PAUSE: Final = 600.0
_LOOK_SECONDS: Final = 0.5
_GROWN_BYTES: Final = 1 << 20
"""So much more room than at the last attempt is a reason for another one."""


class _Next(Enum):
    WAIT, ATTEMPT, LAST_ATTEMPT, END = range(4)


@dataclass(frozen=True)
class Waiting:
    """How a rank waits for the storage.

    Attributes:
        check_group: Called at least every second; raises if the group is broken, so that nobody
            should wait.
        is_asked_to_stop: Whether this rank was asked to stop.
        beat: Called at least every second while a finished training waits, as a sign of life.
        pause_seconds: How long to wait for the next attempt; rank 0's counts.
    """

    check_group: Callable[[], object] = lambda: None
    is_asked_to_stop: Callable[[], bool] = bool
    beat: Callable[[], object] = lambda: None
    pause_seconds: Callable[[], float] = lambda: _FIRST_PAUSE


class RequiredSave:
    """Attempts of one save after another, until one has succeeded or it is given up. Every rank
    calls it, and all do the same.
    """

    def __init__(self, group: CheckpointGroup, root: StoragePath) -> None:
        self.waiting = Waiting()
        self._group = group
        self._root = root
        self._calls = BoundedCalls(str(root))
        self._give_up_at: float | None = None

    def look(self) -> None:
        """Called at least every second while an attempt is in progress. Raises if the group is
        broken.
        """
        self.waiting.check_group()
        if self._give_up_at is not None and time.monotonic() < self._give_up_at:
            self.waiting.beat()  # storage that does not answer is no rank that hangs

    def make(self, attempt: Callable[[], SaveResult], *, is_last: bool) -> None:
        """Attempt a save.

        Args:
            attempt: one attempt; its result is the same on every rank.
            is_last: whether it is the last one of a finished training.

        Raises:
            StorageError: no attempt has succeeded.
            PeersLostError: other ranks are gone.
        """
        self._give_up_at = time.monotonic() + LONGEST_SECONDS if is_last else None
        try:
            result = attempt()
            if not (result.ok or result.secondary):
                result = attempt()
            following = _Next.ATTEMPT if is_last else _Next.LAST_ATTEMPT
            while following is _Next.ATTEMPT and not (result.ok or result.secondary):
                following = self._wait(result)
                if following is not _Next.END:
                    result = attempt()
        finally:
            self._give_up_at = None
        if not result.ok:
            problem = PeersLostError if result.secondary else StorageError
            raise problem(f"the state of step {result.step} could not be saved: {result.error}")

    def _wait(self, result: SaveResult) -> _Next:
        """Wait for the storage; returns what all ranks do then."""
        assert self._give_up_at is not None  # noqa: S101 - there is a last save
        is_rank_zero, now = self._group.is_rank_zero, time.monotonic()
        left = self._give_up_at - now
        pause = max(0.0, min(self.waiting.pause_seconds(), _LONGEST_PAUSE, left))
        room = self._find_room() if is_rank_zero else None
        if is_rank_zero:
            self._tell(result, pause, left)
        while True:
            self.waiting.beat()
            self.waiting.check_group()
            following = _Next.WAIT
            if left <= 0:
                following = _Next.END
            elif time.monotonic() >= now + pause or (is_rank_zero and self._has_grown(room)):
                following = _Next.ATTEMPT
            answers = self._group.gather((self.waiting.is_asked_to_stop(), following))
            if any(stops for stops, _ in answers):
                return _Next.LAST_ATTEMPT
            following = answers[0][1]
            if following is not _Next.WAIT:
                return following
            time.sleep(_LOOK_SECONDS)

    def _tell(self, result: SaveResult, pause: float, left: float) -> None:
        what = f"the finished training, step {result.step}, waits to be saved"
        then = f"next try in {pause:.0f} s, or as soon as there is room"
        if left <= 0:
            then = f"given up after {LONGEST_SECONDS / 60:.0f} min"
        log.warn(
            "save-waits",
            step=result.step,
            cause=result.cause,
            message=f"storage: {self._root}: {what}: {result.error}; free space, or repair it; "
            f"{then}",
        )

    def _find_room(self) -> int | None:
        """The bytes that are free in the folder; None if that is not known."""
        root = self._root
        if not isinstance(root, Path):
            return None
        with suppress(OSError):
            found = self._calls.call(lambda: os.statvfs(root))
            return found.f_bavail * found.f_frsize
        return None

    def _has_grown(self, before: int | None) -> bool:
        now = None if before is None else self._find_room()
        return before is not None and now is not None and now >= before + _GROWN_BYTES

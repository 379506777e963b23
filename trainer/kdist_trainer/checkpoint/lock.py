"""The lock of a checkpoint folder: fencing by epochs that only grow, so that a writer that was
paused cannot win. Free of torch.

The records are in `lock_records`. A dead or sleeping holder blocks nobody: a later group of the run
takes a higher epoch and continues at once, and every writer checks the lock before it commits. An
earlier writer may still be between that check and its rename. Therefore a record also has a
*fence*: the checkpoint that its group started from. Checkpoints of earlier epochs beyond it came
too late and are not valid.

Epochs grow within a folder, whichever runs have used it; generations grow within a run. The epoch
of a group is its generation, or higher if the folder has seen that epoch already.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kdist_trainer.checkpoint.layout import Checkpoint, CheckpointDirectory
from kdist_trainer.checkpoint.lock_records import LockLostError, LockRecord, open_records
from kdist_trainer.checkpoint.manifest import parse_name
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.errors import CheckpointMismatchError

__all__ = ["Lock", "LockLostError", "LockRecord"]

_FENCES = 100


class Lock:
    """The lock of one checkpoint folder, as this process sees it."""

    def __init__(self, root: StoragePath) -> None:
        self._root = root
        self._records = open_records(root)
        self._tried = ""
        """The holder of the record that `acquire` has tried to create last."""
        self.mine: LockRecord | None = None

    def acquire(
        self, *, run_id: str, generation: int, at_least: int = 0, take_over: bool = False
    ) -> LockRecord:
        """Lock the folder for this run. A later generation of the same run takes over at once. It
        may be called again after an error of the disk.

        Args:
            run_id: the run.
            generation: of the worker group.
            at_least: the lowest epoch to take.
            take_over: whether to lock a folder that another run has not released.

        Returns:
            This group's record.

        Raises:
            CheckpointMismatchError: another run holds the folder.
            LockLostError: this generation or a later one of the same run has the lock.
            OSError: the disk failed.
        """
        highest, last = self._records.read()
        if self.mine is None and last is not None and last.holder == self._tried:
            self._records.rewrite(last)  # by a call that failed before it was durable
            self.mine = last
            self.check()
            return last
        if last is not None and last.run_id == run_id:
            # above it there may be records without content, which groups that crashed have left
            latest = last.generation + highest - last.epoch
            if generation == latest and last.released:
                self._records.remove(highest)
                highest -= 1
            elif generation <= latest:
                raise LockLostError(
                    f"generation {latest} of run {run_id} holds {self._root}, this group "
                    f"is of generation {generation}"
                )
        elif last is not None and not (last.released or take_over):
            raise CheckpointMismatchError(
                f"checkpoints in {self._root} belong to run {last.run_id} (on "
                f"{last.host}), not to {run_id}: "
                "wait until it has ended, choose another folder, or use --take-over"
            )
        record = LockRecord(
            max(generation, at_least, highest + 1),
            run_id,
            secrets.token_hex(8),
            socket.gethostname(),
            round(time.time(), 3),
            fences=last.fences if last is not None else (),
            generation=generation,
        )
        self._tried = record.holder
        self._create(record)
        self.check()
        return record

    def raise_epoch(self, epoch: int) -> None:
        """Hold the lock with this higher epoch. Raises `OSError` or `LockLostError`."""
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        self._create(replace(self.mine, epoch=epoch))
        self.check()

    def check(self) -> None:
        """Raise `LockLostError` if this process lost the lock, `OSError` if the disk fails."""
        if self.mine is None:
            raise LockLostError(f"{self._root} is not locked by this process")
        highest, last = self._records.read()
        if highest != self.mine.epoch:
            holder = f"epoch {highest} has taken it over" if highest else "its lock is gone"
            raise LockLostError(f"epoch {self.mine.epoch} lost {self._root}: {holder}")
        if last is None or last.holder != self.mine.holder:
            raise LockLostError(f"epoch {self.mine.epoch} of {self._root} was locked twice")

    def set_base(self, checkpoint: Checkpoint | None) -> None:
        """Fence off later commits of earlier groups: `checkpoint` is what this group starts from.

        Raises `OSError` or `LockLostError`.
        """
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        base = checkpoint.name if checkpoint else ""
        # a fence includes older ones with the same checkpoint
        older = [fence for fence in self.mine.fences if fence[1] != base]
        self._rewrite(fences=(*older, (self.mine.epoch, base))[-_FENCES:])
        self._records.prune()

    def release(self) -> None:
        """Release the folder for any other run. Does nothing if the lock was lost."""
        with suppress(LockLostError, OSError):
            self._rewrite(released=True)
        self.mine, self._tried = None, ""

    def last(self) -> LockRecord | None:
        """The newest complete record: a crash may leave a higher one empty. Raises `OSError`."""
        return self._records.read()[1]

    def find_valid(self) -> list[Checkpoint]:
        """The checkpoints that a training may resume from, newest first. Whoever asks which one is
        the newest asks here: what is on the disk besides does not count, nor what LATEST says.
        Raises `OSError`.
        """
        return self.valid(CheckpointDirectory(self._root).committed())

    def find_newest(self) -> Checkpoint | None:
        """The newest of them, the one of the last group that has saved; whether it verifies is not
        checked. Raises `OSError`.
        """
        return next(iter(self.find_valid()), None)

    def valid(self, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints that were committed by a holder of the lock, in the given order. Raises
        `OSError`.
        """
        last = self.last()
        fences = (
            [(epoch, parse_name(base) or (-1, -1)) for epoch, base in last.fences]
            if last is not None
            else []
        )
        return [
            one
            for one in checkpoints
            if all(one.epoch >= epoch or one.order <= base for epoch, base in fences)
        ]

    def _create(self, record: LockRecord) -> None:
        try:
            self._records.create(record)
        except FileExistsError as error:
            raise LockLostError(
                f"epoch {record.epoch} of {self._root} was locked at the same time"
            ) from error
        self.mine = record

    def _rewrite(self, **changes: Any) -> None:
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        changed = replace(self.mine, **changes)
        try:
            self._records.rewrite(changed)
        except FileExistsError as error:
            raise LockLostError(f"epoch {self.mine.epoch} lost {self._root}") from error
        self.mine = changed

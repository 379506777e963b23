"""Opens the checkpoint folder for a worker group: finds out which ranks share it, and locks it.

Nobody trains while the ranks of a group exchange messages. Those that continue in place therefore
need only two exchanges here: rank 0 does all that it has to do, then every rank says what it sees.
They need no storage to go on either: what the folder does not answer in time goes on while they
train, and is asked for again before a save (`FolderAccess.open_late`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kdist_trainer import log
from kdist_trainer.checkpoint import commit
from kdist_trainer.checkpoint.bounded_calls import BoundedCalls
from kdist_trainer.checkpoint.cut_saves import count_cuts, record_leftovers
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import Checkpoint, CheckpointDirectory
from kdist_trainer.checkpoint.probe import Token, read_token, remove_token, write_token
from kdist_trainer.errors import CheckpointMismatchError, StorageError

T = TypeVar("T")
SHARDED: Final = (
    "and each holds a part of the model: use a volume that all nodes mount (ReadWriteMany), or "
    "strategy ddp"
)
"""Why ranks that hold parts of the state must share the folder, and what to do otherwise."""


class LockRequest(NamedTuple):
    """Who locks a folder."""

    run_id: str
    generation: int
    take_over: bool
    """Whether to lock a folder that another run holds."""
    spared: Collection[str] = ()
    """Names of the folders that ranks of former groups still write to."""


class OpenFolder(NamedTuple):
    """A checkpoint folder that this worker group has locked.

    Attributes:
        sees: By rank, whether its folder is rank 0's.
        epoch: Of the group.
        name: Of the group in this folder, for its temporary files; random.
        newest: For ranks that continue in place, the checkpoint that theirs follow.
        may_be_done: Whether a folder may say that the run has ended.
        cuts: For ranks that start, the saves in a row that lost ranks have cut.
    """

    sees: list[bool]
    epoch: int
    name: str
    newest: Checkpoint | None = None
    may_be_done: bool = True
    cuts: int = 0

    @classmethod
    def unopened(cls, ranks: int) -> OpenFolder:
        """What stands for a folder that does not answer yet."""
        return cls([True] * ranks, epoch=0, name="")


class FolderOpener:
    """Opens one folder for the ranks of a group. Every method is collective."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        lock: Lock,
        group: CheckpointGroup,
        request: LockRequest,
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._group = group
        self._request = request
        what = f"the checkpoint folder {directory.root}"
        self._beginning, self._calls = BoundedCalls(what), BoundedCalls(what)

    def open(self, *, must_be_shared: str | None) -> OpenFolder:
        """Open the folder for ranks that start or restart.

        Args:
            must_be_shared: why all ranks must share the folder, and what to do otherwise; None if
                they need not.

        Raises:
            CheckpointMismatchError: the folder belongs to another run or lacks what is needed.
            LockLostError: a later group of this run has locked it.
            StorageError: it cannot be written.
        """
        sees = self._find_sharing()
        self._check_shared(sees, must_be_shared)
        others = [0] if all(sees) else self._group.gather(self._find_epoch())

        def begin() -> OpenFolder:
            epoch = self._acquire(at_least=max(others) + 1)
            if not isinstance(self._directory.root, Path):
                record_leftovers(self._directory, self._lock, spared=self._request.spared)
            return OpenFolder(sees, epoch, secrets.token_hex(4), cuts=self._count_cuts())

        return self._on_lock(begin)

    def _count_cuts(self) -> int:
        with suppress(OSError):
            return count_cuts(RunLedger(self._directory.root).events())
        return 0

    def continue_in_place(self) -> OpenFolder:
        """Open the folder for ranks of which some have used it in their former group, whose state
        they have in memory: what they save follows the newest checkpoint.

        Raises as `open` does, and `StorageError` from a `TimeoutError` if the storage does not
        answer within seconds. It may be called again then, and goes on where it was.
        """
        group = self._group
        token, epoch, newest, name = self._on_lock(lambda: self._beginning.resume(self._begin))
        try:
            every = group.on_all_ranks(lambda: self._calls.call(lambda: self._look(token)))
        except OSError as error:
            raise StorageError(f"cannot read {self._directory.root}: {error}") from error
        finally:
            if group.is_rank_zero:
                with suppress(OSError):
                    self._calls.call(lambda: remove_token(self._directory.root, token))
        sees = [one for one, _, _ in every]
        self._check_shared(sees, None)
        others = max((found for is_seen, found, _ in every if not is_seen), default=0)
        if others >= epoch:
            epoch = others + 1
            self._on_lock(lambda: self._calls.call(lambda: self._lock.raise_epoch(epoch)))
        return OpenFolder(sees, epoch, name, newest, any(is_done for _, _, is_done in every))

    @property
    def has_answered(self) -> bool:
        """Whether on rank 0, which asks, the folder has answered what it did not in time."""
        return self._beginning.has_answered

    def _look(self, token: Token) -> tuple[bool, int, bool]:
        """Whether this rank sees rank 0's folder, its highest epoch, and whether the run is done by
        it.
        """
        is_done = self._directory.done() is not None
        return read_token(self._directory.root, token), self._find_epoch(), is_done

    def _on_lock(self, work: Callable[[], T]) -> T:
        """Do something to the lock on rank 0, and return its result on every rank. Raises what it
        raises, and `StorageError` for an `OSError`.
        """
        try:
            return self._group.on_rank_zero(work)
        except OSError as error:
            raise StorageError(
                f"cannot write the lock of {self._directory.root}: {error}"
            ) from error

    def set_base(self, base: Checkpoint | None) -> None:
        """Fence off what earlier groups commit from now on; `base` is what this group started from.
        Raises `StorageError` or `LockLostError`.
        """
        self._on_lock(lambda: self._lock.set_base(base))

    def _begin(self) -> tuple[Token, int, Checkpoint | None, str]:
        """Rank 0's part of `continue_in_place`."""
        token = write_token(self._directory.root)
        try:
            if self._lock.mine is None:
                epoch = self._acquire(at_least=0)
            else:  # by an attempt that the storage has failed later
                self._lock.check()
                epoch = self._lock.mine.epoch
            newest = self._lock.find_newest()
            self._lock.set_base(newest)
        except BaseException:
            remove_token(self._directory.root, token)
            raise
        return token, epoch, newest, secrets.token_hex(4)

    def _acquire(self, *, at_least: int) -> int:
        """Lock the folder; returns the epoch."""
        request = self._request
        record = self._lock.acquire(
            run_id=request.run_id,
            generation=request.generation,
            take_over=request.take_over,
            at_least=at_least,
        )
        if isinstance(self._directory.root, Path):
            record_leftovers(self._directory, self._lock, spared=request.spared)
            commit.clean_stale(self._directory, before=record.epoch + 1, spared=request.spared)
        # in an object store it would take long: the writer does so before it saves
        return record.epoch

    def _find_epoch(self) -> int:
        """The highest epoch of a checkpoint in this rank's folder."""
        return max((one.epoch for one in self._directory.committed()), default=0)

    def _find_sharing(self) -> list[bool]:
        """By rank, whether its folder is rank 0's, which also finds out whether the file system has
        what checkpoints need. Raises as `open` does.
        """
        root, group = self._directory.root, self._group
        try:
            token = group.on_rank_zero(lambda: write_token(root, is_new=True))
        except OSError as error:
            raise StorageError(f"cannot write to the checkpoint folder {root}: {error}") from error
        try:
            return group.on_all_ranks(lambda: read_token(root, token))
        finally:
            if group.is_rank_zero:
                remove_token(root, token)

    def _check_shared(self, sees: list[bool], must_be_shared: str | None) -> None:
        if all(sees):
            return
        root = self._directory.root
        if must_be_shared is not None:
            raise CheckpointMismatchError(
                f"the ranks do not share the checkpoint folder {root}, {must_be_shared}"
            )
        if self._group.is_rank_zero:
            log.warn(
                "storage-not-shared",
                message=(
                    f"{root} is not one folder for all ranks: rank 0 writes "
                    "everything and broadcasts on load"
                ),
            )

"""A worker group's access to its checkpoint folder: `FolderAccess`.

Ranks that start need the folder, to restore from it. Ranks that continue in place have their state
in memory: if the storage fails, they train without the folder, and open it before the next save.
Nothing is saved before, since only an open folder is locked for their group.
"""

from __future__ import annotations

from typing import Any

from kdist_trainer import log
from kdist_trainer.checkpoint.commit import SaveResult, cause_of
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.lock import Lock, LockRecord
from kdist_trainer.checkpoint.manifest import Checkpoint, CheckpointDirectory
from kdist_trainer.checkpoint.opening import FolderOpener, LockRequest, OpenFolder
from kdist_trainer.checkpoint.run_identity import write_done
from kdist_trainer.errors import StorageError


class FolderAccess:
    """Opens the folder, late if need be. Collective but for its properties."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        group: CheckpointGroup,
        request: LockRequest,
        *,
        must_be_shared: str | None,
        is_known: bool,
    ) -> None:
        """Open the folder.

        Args:
            directory: the folder.
            group: the ranks.
            request: who locks it.
            must_be_shared: why all ranks must share it, and what to do otherwise; None if they need
                not.
            is_known: whether ranks of a former group, which has used the folder, continue in place:
                then storage that fails is `trouble`, and no error.

        Raises:
            CheckpointMismatchError: the folder belongs to another run or lacks what is needed.
            LockLostError: a later group of this run has locked it.
            StorageError: it cannot be written.
        """
        self.lock = Lock(directory.root)
        self._directory = directory
        self._group = group
        self._opener = FolderOpener(directory, self.lock, group, request)
        self.trouble: StorageError | None = None
        """Why the folder is not open yet, so that nothing can be saved or restored."""
        self._opened = OpenFolder.unopened(group.size)
        if not is_known:
            self._opened = self._opener.open(must_be_shared=must_be_shared)
            return
        try:
            self._opened = self._opener.continue_in_place()
        except StorageError as error:
            self.trouble = error
            if group.is_rank_zero:
                log.warn("storage-unavailable", message=f"{error}; ranks go on in place")

    def open_late(self) -> None:
        """Open the folder, if that has failed so far. Raises as the constructor does."""
        if self.trouble is None:
            return
        try:
            self._opened = self._opener.continue_in_place()
        except StorageError as error:
            self.trouble = error
            raise
        self.trouble = None

    def refuse(self, step: int, error: StorageError) -> SaveResult:
        """Log that a save of `step` has failed before anything was written, or after all was;
        returns its result.
        """
        result = self.describe(step, error)
        if self._group.is_rank_zero:
            log.warn("checkpoint-failed", step=step, cause=result.cause, error=result.error)
        return result

    @staticmethod
    def describe(step: int, error: StorageError) -> SaveResult:
        """The result of a save of `step` that fails with this error."""
        cause = cause_of(error.__cause__ or error)
        return SaveResult(step, ok=False, cause=cause, error=str(error))

    @property
    def has_answered(self) -> bool:
        """Whether rank 0, which asks, would find the folder open that did not answer in time."""
        return self.trouble is not None and self._opener.has_answered

    @property
    def opened(self) -> OpenFolder:
        """What is known of the folder."""
        return self._opened

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return all(self._opened.sees)

    @property
    def lock_record(self) -> LockRecord | None:
        """What rank 0 holds the folder by; None while it is not open."""
        return self.lock.mine if self.trouble is None else None

    def set_base(self, base: Checkpoint | None) -> None:
        """See `FolderOpener.set_base`."""
        self._opener.set_base(base)

    def reopen(self) -> None:
        """Mark the run as not ended, by removing DONE. Raises `StorageError`."""
        if not self._opened.may_be_done or self.trouble is not None:
            return

        def remove() -> None:
            if self._group.is_rank_zero or not self._opened.sees[self._group.rank]:
                self._directory.remove_done()

        try:
            self._group.on_all_ranks(remove)
        except OSError as error:
            raise StorageError(
                f"cannot remove DONE from {self._directory.root}: {error}"
            ) from error

    def end_run(self, document: dict[str, Any]) -> SaveResult:
        """Write DONE after the last checkpoint, which `document` is about."""
        sees = self._opened.sees[self._group.rank]
        try:
            write_done(self._directory, self._group, document, sees_rank_zero_folder=sees)
        except StorageError as error:
            return self.refuse(document["step"], error)
        return SaveResult(document["step"], ok=True)

    def release(self) -> None:
        """Let any run use the folder."""
        if self._group.is_rank_zero and self.trouble is None:
            self.lock.release()

"""A save that outlasts the worker group in which it began: `CarriedSave`.

Where each rank holds the whole state, one that has survived a loss copies all of it and writes it
alone, in the background. No loss of another rank ends that, however long the storage takes. It is
committed under the lock of the group that the rank is a member of by then; while it is in none, the
commit waits.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from kdist_trainer.checkpoint.background import BackgroundTask
from kdist_trainer.checkpoint.commit import CommitRequest, SaveResult, discard
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.checkpoint.loadable import Description
from kdist_trainer.checkpoint.lock import Lock, LockRecord
from kdist_trainer.checkpoint.staging import Paths
from kdist_trainer.checkpoint.writer import Content, Writer
from kdist_trainer.config import Checkpointing
from kdist_trainer.digest import Digest


class _Alone(NamedTuple):
    """A group of one rank."""

    rank: int = 0
    size: int = 1
    generation: int = 0


class _DroppedError(Exception):
    """The save is not wanted any more."""


class _Membership:
    """Says under whose lock a save may be committed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._record: LockRecord | None = None
        self._is_dropped = False
        self._is_committing = False
        self.is_committed = False

    def set(self, record: LockRecord | None, *, drops: bool = False) -> None:
        """Change the group, once no commit is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_committing)
            self._record = record
            self._is_dropped |= drops
            self._changed.notify_all()

    def begin_commit(self) -> LockRecord:
        """Wait for a group; it stays until `end_commit`. Raises `_DroppedError`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_dropped or self._record is not None)
            if self._is_dropped or self._record is None:
                raise _DroppedError
            self._is_committing = True
            return self._record

    def end_commit(self) -> None:
        """Let the group change again; may be called without a commit."""
        with self._changed:
            self._is_committing = False
            self._changed.notify_all()


class _CarriedWriter(Writer):
    """Writes all of a state on one rank, and commits it once that is a member of a group."""

    bounds_events = False  # rank 0 may do so at the same time

    def __init__(
        self, directory: CheckpointDirectory, membership: _Membership, config: Checkpointing
    ) -> None:
        super().__init__(
            directory,
            group=CheckpointGroup(_Alone()),
            lock=Lock(directory.root),
            config=config,
            shared=True,
        )
        self._is_cleaned = True  # by rank 0
        self._membership = membership
        self._written: CommitRequest | None = None

    def commit(self, request: CommitRequest, content: Content) -> SaveResult:
        try:
            result = super().commit(request, content)
            self._membership.is_committed = result.ok
        finally:
            self._membership.end_commit()
        return result

    def _commit(self, request: CommitRequest, digests: dict[str, Digest]) -> SaveResult:
        record = self._membership.begin_commit()
        self._lock.mine = record
        newest = self._lock.find_newest()
        if newest is not None and newest.step >= request.manifest.step:
            raise _DroppedError
        self._written = replace(request, manifest=replace(request.manifest, epoch=record.epoch))
        return super()._commit(self._written, digests)

    def _find_root(self, error: BaseException) -> BaseException:
        # while it is written no lock is held
        return super()._find_root(error) if self._written is not None else error

    def _failed(self, request: CommitRequest, error: BaseException) -> SaveResult:
        if isinstance(error, _DroppedError):
            discard(self._directory, request)
            return SaveResult(request.manifest.step, ok=False, cause="superseded")
        return super()._failed(self._written or request, error)


class CarriedSave:
    """One save, which this process writes alone. Used on the thread of the training."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        config: Checkpointing,
        request: CommitRequest,
        staged: dict[str, Any],
        paths: Paths,
        described: Description | None,
    ) -> None:
        """Begin to write; it is committed once the rank is a member of a group (`attach`).

        Args:
            directory: the checkpoint folder.
            config: what to keep.
            request: what to commit besides the tensors.
            staged: copies of the whole state, by flat name.
            paths: the path of keys of each.
            described: what must be found when it is read back.
        """
        self.step = request.manifest.step
        self.folder = request.temporary.name
        """Name of the folder that it is written to."""
        self._membership = _Membership()
        self._result: SaveResult | None = None
        writer = _CarriedWriter(directory, self._membership, config)
        self._task = BackgroundTask[SaveResult]()
        self._task.start(partial(writer.write, request, staged, paths, described))

    @property
    def result(self) -> SaveResult | None:
        """What has become of it; None while it is in progress."""
        if self._result is None and not self._task.busy:
            self._result = self._task.collect()
        return self._result

    def attach(self, record: LockRecord) -> None:
        """Allow the commit: this rank is a member of the group whose rank 0 holds this record."""
        self._membership.set(record)

    def detach(self) -> None:
        """Leave the group; a commit in progress is waited for."""
        self._membership.set(None)

    def drop(self) -> bool:
        """Give it up, unless it is committed; returns whether it is."""
        self._membership.set(None, drops=True)
        return self._membership.is_committed

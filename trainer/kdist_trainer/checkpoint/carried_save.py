"""A save that outlasts the worker group in which it began: `CarriedSave`.

Where each rank holds the whole state, one that has survived a loss copies all of it and writes it
alone, in the background. No loss of another rank ends that, however long the storage takes. It is
committed under the lock of the group that the rank is a member of by then; while it is in none, the
commit waits. What rank 0 of a broken group was committing goes on likewise, if all its files are
there.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from kdist_trainer.checkpoint.commit import CommitRequest, SaveResult
from kdist_trainer.checkpoint.group import BackgroundTask, CheckpointGroup
from kdist_trainer.checkpoint.loadable import Description
from kdist_trainer.checkpoint.lock import Lock, LockRecord
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.membership import Membership
from kdist_trainer.checkpoint.staging import Paths
from kdist_trainer.checkpoint.writer import Writer
from kdist_trainer.config import Checkpointing


class _Alone(NamedTuple):
    """A group of one rank."""

    rank: int = 0
    size: int = 1
    generation: int = 0


class _CarriedWriter(Writer):
    """Writes all of a state on one rank, and commits it once that is a member of a group."""

    bounds_events = False  # rank 0 may do so at the same time
    may_be_overtaken = True

    def __init__(self, directory: CheckpointDirectory, config: Checkpointing) -> None:
        super().__init__(
            directory,
            group=CheckpointGroup(_Alone()),
            lock=Lock(directory.root),
            config=config,
            shared=True,
        )
        self._is_cleaned = True  # by rank 0

    def _find_root(self, error: BaseException) -> BaseException:
        # while it is written no lock is held
        return super()._find_root(error) if self._lock.mine is not None else error


class CarriedSave:
    """One save, which this process goes on with alone. Used on the thread of the training."""

    def __init__(
        self, task: BackgroundTask[SaveResult], membership: Membership, *, step: int, folder: str
    ) -> None:
        """Take over a save; it is committed once the rank is a member of a group (`attach`).

        Args:
            task: what writes and commits it.
            membership: says under whose lock it is committed.
            step: its step.
            folder: name of the folder that it is written to.
        """
        self.step = step
        self.folder = folder
        """Name of the folder that it is written to."""
        self._membership = membership
        self._task = task
        self._result: SaveResult | None = None

    @classmethod
    def begin(
        cls,
        directory: CheckpointDirectory,
        config: Checkpointing,
        request: CommitRequest,
        staged: dict[str, Any],
        paths: Paths,
        described: Description | None,
    ) -> CarriedSave:
        """Begin to write one.

        Args:
            directory: the checkpoint folder.
            config: what to keep.
            request: what to commit besides the tensors.
            staged: copies of the whole state, by flat name.
            paths: the path of keys of each.
            described: what must be found when it is read back.
        """
        writer = _CarriedWriter(directory, config)
        task = BackgroundTask[SaveResult]()
        task.start(partial(writer.write, request, staged, paths, described))
        step, folder = request.manifest.step, request.temporary.name
        return cls(task, writer.membership, step=step, folder=folder)

    @property
    def is_in_progress(self) -> bool:
        """Whether it has not ended. Any thread may ask."""
        return self._task.busy

    @property
    def result(self) -> SaveResult | None:
        """What has become of it; None while it is in progress."""
        if self._result is None and not self._task.busy:
            self._result = self._task.collect()
        return self._result

    def wait(self) -> SaveResult:
        """What has become of it, once it has ended: it is committed, or dropped."""
        if self._result is None:
            self._result = self._task.collect()
        return self._result

    def attach(self, record: LockRecord) -> None:
        """Allow the commit: this rank is a member of the group whose rank 0 holds this record."""
        self._membership.set(record)

    def detach(self) -> None:
        """Leave the group. A commit in progress is not waited for: if it comes too late for this
        group, it is repeated in the next one.
        """
        self._membership.set(None)

    def drop(self) -> bool:
        """Give it up, unless it is committed; returns whether it is."""
        return self._membership.drop()

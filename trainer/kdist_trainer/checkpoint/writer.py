"""Writes the staged copy of a state with DCP while the training continues, and commits it on rank
0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from kdist_trainer import log
from kdist_trainer.checkpoint import commit, storage
from kdist_trainer.checkpoint.commit import (
    DROPPED,
    CommitRequest,
    SaveResult,
    UnsettledCommitError,
    cause_of,
    commit_checkpoint,
    discard,
)
from kdist_trainer.checkpoint.cut_saves import record_cut
from kdist_trainer.checkpoint.dcp import DcpPlanner, DcpWriter, without_crc32
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.loadable import Description, check_saved
from kdist_trainer.checkpoint.lock import Lock, LockLostError, LockRecord
from kdist_trainer.checkpoint.manifest import MANIFEST, CheckpointDirectory, read_raw_manifest
from kdist_trainer.checkpoint.membership import Membership, SaveDroppedError
from kdist_trainer.checkpoint.staging import Paths
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Checkpointing
from kdist_trainer.digest import Digest
from kdist_trainer.errors import classify
from kdist_trainer.object_store.store import ObjectPath

Content = Callable[[], dict[str, Digest]]
"""Writes this rank's files to the temporary folder, synced, and returns the digests of all ranks'
files. Collective.
"""


class Writer:
    """Writes and commits checkpoints, one at a time, on any thread. Collective over `group`."""

    bounds_events = True
    """Whether it keeps the run's events few."""
    may_be_overtaken = False
    """Whether others may save a later step meanwhile."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        group: CheckpointGroup,
        lock: Lock,
        config: Checkpointing,
        shared: bool,
        spared: Collection[str] = (),
    ) -> None:
        self._directory = directory
        self._group = group
        self._lock = lock
        self._kept: Any = {"keep": config.keep, "apart": config.seconds_apart}
        self._shared = shared
        self._ledger = RunLedger(directory.root)
        self._spared = spared
        self.acknowledged: SaveResult | None = None
        self.membership = Membership()
        """Of the save in progress."""
        self.is_writing = False
        """Whether this rank writes its files: they may take as long as the storage likes, and
        without all other ranks there will be no checkpoint of them.
        """
        self.needs_nobody = False
        """Whether this rank can commit the save in progress without the others: it is rank 0, and
        all files are written, or it writes all of them.
        """
        self._attempts: list[CommitRequest] = []
        """Of the save in progress, as they were to be committed."""
        self._is_cleaned = False

    def begin(self) -> None:
        """A save begins, to be committed under the lock that is held now; called before its thread
        is started.
        """
        self.membership = Membership()
        self.membership.set(self._lock.mine)
        self._attempts, self.needs_nobody = [], self._writes_alone and self._group.is_rank_zero

    def write(
        self,
        request: CommitRequest,
        staged: dict[str, Any],
        paths: Paths,
        described: Description | None = None,
    ) -> SaveResult:
        """Write and commit a checkpoint, unless this worker group has already committed its step.

        Args:
            request: what to commit besides the tensors.
            staged: this rank's copies by flat name.
            paths: the path of keys of each.
            described: what must be found when it is read back, before it is committed; None if
                a checkpoint of this shape was read back before.

        Returns:
            The result, as of `commit`.
        """
        return self.commit(request, lambda: self._write_tensors(request, staged, paths, described))

    def commit(self, request: CommitRequest, content: Content) -> SaveResult:
        """Commit a checkpoint of what `content` writes, unless this worker group has already
        committed its step.

        Args:
            request: what to commit besides it.
            content: called on every rank.

        Returns:
            The result, the same on every rank, also of a save that failed; unless it failed since
            a rank is lost.
        """
        if self.acknowledged is not None and self.acknowledged.step == request.manifest.step:
            return _timed(self.acknowledged, request)
        result: SaveResult | None = None
        try:
            if self._group.is_rank_zero and not self._is_cleaned:
                self._clean(request)
            digests = content()
            if self._group.is_rank_zero:
                result = self._commit(request, digests)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a failed save is counted and the training continues
            result = self._failed(request, error)
            if result.secondary:
                # The group is broken. Others may still be in the collective that has raised here:
                # another one would look like ranks that differ, which ends a job for good.
                return result
        try:
            agreed = self._group.broadcast(result)
        except Exception as error:  # noqa: BLE001 - another rank is gone, which the training will find out itself
            agreed = result if result is not None else self._failed(request, error)
        assert agreed is not None  # noqa: S101 - rank 0 has committed or failed
        if agreed.ok:
            self.acknowledged = agreed
            if self._group.is_rank_zero:
                commit.prune(self._directory, self._lock, **self._kept)
        return agreed

    def _clean(self, request: CommitRequest) -> None:
        """Remove what groups before have left: those that were killed between a commit and what it
        removes, and in an object store cut saves. A folder on a disk is rid of these when it is
        locked.
        """
        if not isinstance(self._directory.root, Path):
            before = request.manifest.epoch
            commit.clean_stale(self._directory, before=before, spared=self._spared)
        commit.prune(self._directory, self._lock, **self._kept)
        self._is_cleaned = True

    def _write_tensors(
        self,
        request: CommitRequest,
        staged: dict[str, Any],
        paths: Paths,
        described: Description | None,
    ) -> dict[str, Digest]:
        """Have DCP write every rank's share, and read it back; returns the digests of all files,
        computed by their writers.
        """
        alone = self._writes_alone
        if alone and not self._group.is_rank_zero:
            return {}
        writer = DcpWriter(request.temporary, request.manifest.name)
        planner = DcpPlanner(paths)
        self.is_writing = True
        try:
            with without_crc32():
                state_dict_saver.save(
                    staged,
                    storage_writer=writer,
                    planner=planner,
                    process_group=self._group.process_group,
                    no_dist=alone,
                )
        finally:
            self.is_writing = False
        own = (writer.fs.digests, described)
        shares = [own] if alone else self._group.gather(own)
        digests = {name: digest for share, _ in shares for name, digest in share.items()}
        expected = [one for _, one in shares]
        self.needs_nobody = self._group.is_rank_zero
        if self._group.is_rank_zero and any(one is not None for one in expected):
            # not under its name yet
            manifest = replace(request.manifest, files=digests)
            check_saved(request.temporary, manifest, expected)
        return digests

    @property
    def _writes_alone(self) -> bool:
        """Whether rank 0 writes all files."""
        return self._group.size == 1 or not self._shared

    def _commit(self, request: CommitRequest, digests: dict[str, Digest]) -> SaveResult:
        """Commit under the lock of the group that this rank is a member of, and if it has left that
        one meanwhile, under that of its next one.
        """
        if not self.may_be_overtaken and self._lock.mine is None:
            self._lock.check()  # a later group has it
        while True:
            record = self.membership.begin_commit()
            result: SaveResult | None = None
            try:
                result = self._commit_as(record, request, digests)
            except LockLostError:
                if not self.membership.has_left(record):
                    raise
            finally:
                self.membership.end_commit(is_committed=result is not None)
            if result is not None:
                self._record(result)
                return result

    def _commit_as(
        self, record: LockRecord, request: CommitRequest, digests: dict[str, Digest]
    ) -> SaveResult:
        if self._lock.mine is None or self._lock.mine.holder != record.holder:
            self._lock.mine = record
        attempt = replace(request, manifest=replace(request.manifest, epoch=record.epoch))
        path, nbytes = self._find_committed(attempt), 0
        if path is None:
            self._attempts.append(attempt)
            manifest = commit_checkpoint(self._directory, self._lock, attempt, digests)
            path, nbytes = self._directory.root / manifest.name, manifest.nbytes
        else:
            nbytes = read_raw_manifest(path).nbytes
        return _timed(SaveResult(request.manifest.step, ok=True, nbytes=nbytes, path=path), request)

    def _find_committed(self, request: CommitRequest) -> StoragePath | None:
        """What an earlier attempt has committed before the rank's next group took the lock; one
        that came too late gives its files back. Raises `SaveDroppedError` if there is a newer
        checkpoint.
        """
        names = [one.manifest.name for one in self._attempts]
        if not names and not self.may_be_overtaken:
            return None
        newest = self._lock.find_newest()
        if newest is not None and newest.name in names:
            return newest.path
        if newest is not None and newest.step >= request.manifest.step:
            raise SaveDroppedError
        for name in names if isinstance(self._directory.root, ObjectPath) else ():
            with suppress(FileNotFoundError):  # it does not count, and names the same files
                storage.remove(self._directory.root / name / MANIFEST)
        if names and isinstance(folder := request.temporary, Path) and not folder.exists():
            try:
                storage.rename(folder.with_name(names[-1]), folder)
            except FileNotFoundError:  # the next group has removed it, as it does not count
                raise SaveDroppedError from None
        return None

    def _record(self, result: SaveResult) -> None:
        seconds, visible = round(result.total_seconds, 4), round(result.visible_seconds, 4)
        try:
            self._ledger.append(
                "commit",
                step=result.step,
                seconds=seconds,
                visible_seconds=visible,
                bytes=result.nbytes,
            )
            if self.bounds_events:
                self._ledger.bound()
        except OSError as error:
            log.warn("ledger-write-failed", step=result.step, error=str(error))
        log.event(
            "checkpoint-committed",
            step=result.step,
            path=str(result.path),
            seconds=seconds,
            visible_seconds=visible,
            bytes=result.nbytes,
        )

    def _find_root(self, error: BaseException) -> BaseException:
        root = _root_of(error)
        if self._group.is_rank_zero:
            try:
                # the group that takes over deletes our files, which looks like a failing disk
                self._lock.check()
            except (LockLostError, OSError) as lost:
                root = lost if isinstance(lost, LockLostError) else root
        return root

    def _failed(self, request: CommitRequest, error: BaseException) -> SaveResult:
        request = self._attempts[-1] if self._attempts else request
        if isinstance(error, SaveDroppedError) or self.membership.is_dropped:
            discard(self._directory, request)
            return SaveResult(request.manifest.step, ok=False, cause=DROPPED)
        root = self._find_root(error)
        message = f"{type(root).__name__}: {root}"
        secondary = not classify(root)[2]
        result = _timed(
            SaveResult(
                request.manifest.step,
                ok=False,
                cause=cause_of(root),
                error=message,
                secondary=secondary,
            ),
            request,
        )
        if self._group.is_rank_zero:
            if secondary:
                record_cut(self._ledger, step=result.step, folder=request.temporary.name)
            if not isinstance(root, UnsettledCommitError):
                discard(self._directory, request)
            log.warn("checkpoint-failed", step=result.step, cause=result.cause, error=result.error)
        return result


def _timed(result: SaveResult, request: CommitRequest) -> SaveResult:
    total = time.monotonic() - request.started
    visible = total if request.visible_seconds is None else request.visible_seconds
    return replace(result, visible_seconds=visible, total_seconds=total)


def _root_of(error: BaseException) -> BaseException:
    """The root cause among the errors of all ranks that DCP collects."""
    if isinstance(error, CheckpointException) and error.failures:
        errors = [wrapped[0] for wrapped in error.failures.values()]
        return next((one for one in errors if isinstance(one, OSError | LockLostError)), errors[0])
    return error

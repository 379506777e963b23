"""Writes the staged copy of a state with DCP while the training continues, and commits it on rank
0.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.serialization import get_crc32_options, set_crc32_options

from kdist_trainer import log
from kdist_trainer.checkpoint import commit, storage
from kdist_trainer.checkpoint.commit import (
    CommitRequest,
    SaveResult,
    UnsettledCommitError,
    cause_of,
    commit_checkpoint,
    discard,
)
from kdist_trainer.checkpoint.cut_saves import record_cut
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.loadable import Description, check_saved
from kdist_trainer.checkpoint.lock import Lock, LockLostError
from kdist_trainer.checkpoint.staging import Paths
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Checkpointing
from kdist_trainer.digest import Digest
from kdist_trainer.errors import classify

Content = Callable[[], dict[str, Digest]]
"""Writes this rank's files to the temporary folder, synced, and returns the digests of all ranks'
files. Collective.
"""


# Where one rank writes everything, DCP saves without a process group on purpose.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


class _DurableFileSystem(FileSystem):
    """DCP's access to the disk: every stream is on the disk when it is closed, and has a digest.

    It replaces DCP's `sync_files`, which syncs `.metadata` before Python's buffer is flushed.
    """

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoints are written once, not opened as {mode!r}")
        file = storage.create(Path(path))
        with file:
            yield file
        self.digests[Path(path).name] = file.digest

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        storage.rename(Path(path), Path(new_path))
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        storage.make_folder(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        storage.remove(Path(path))


class _ObjectFileSystem(_DurableFileSystem):
    """DCP's access to an object store: every stream is a whole object when it is closed. Its index
    gets its own name at once, since nothing can be renamed.
    """

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix.removesuffix(".tmp")

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            raise ValueError(f"checkpoints are written once, not opened as {mode!r}")
        file = storage.create(path)
        with file:
            yield file
        self.digests[path.name] = file.digest

    def exists(self, path: Any) -> bool:  # noqa: ARG002 - DCP's signature
        return False  # a folder is written to once

    def mkdir(self, path: Any) -> None:
        """Do nothing: there are no folders."""

    def rename(self, path: Any, new_path: Any) -> None:
        """Do nothing: it has that name already."""


class _Writer(FileSystemWriter):
    """DCP's writer over that file system, with the checkpoint's name as its id instead of a random
    number.
    """

    def __init__(self, path: StoragePath, name: str) -> None:
        super().__init__(
            path if isinstance(path, Path) else Path(),
            single_file_per_rank=True,
            sync_files=False,
            thread_count=1,
            per_thread_copy_ahead=0,
        )
        self.fs: _DurableFileSystem = _DurableFileSystem()
        if not isinstance(path, Path):
            self.fs, self.path = _ObjectFileSystem(), cast(Any, path)
        self.save_id = name

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.save_id, save_id=self.save_id)


class _Planner(DefaultSavePlanner):
    """Plans a flat share of a state, under the paths that the nested state had."""

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self._paths = paths

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # flat already; DCP would take dicts apart whose keys are no texts, and make texts of them
        self.flatten_state_dict = False
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.flatten_state_dict = True  # so that the plan has the paths
        self.mappings = dict(self._paths)


@contextmanager
def _without_crc32() -> Generator[None, None, None]:
    """Have `torch.save` compute no checksum of each tensor, which nothing would ever compare: the
    digest of the file covers them all.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class Writer:
    """Writes and commits checkpoints, one at a time, on any thread. Collective over `group`."""

    bounds_events = True
    """Whether it keeps the run's events few."""

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
        self.is_writing = False
        """Whether this rank writes its files: they may take as long as the storage likes, and
        without all other ranks there will be no checkpoint of them.
        """
        # a folder on a disk is cleaned when it is locked
        self._is_cleaned = isinstance(directory.root, Path)

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
                before = request.manifest.epoch
                commit.clean_stale(self._directory, before=before, spared=self._spared)
                self._is_cleaned = True
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
        alone = self._group.size == 1 or not self._shared
        if alone and not self._group.is_rank_zero:
            return {}
        writer = _Writer(request.temporary, request.manifest.name)
        planner = _Planner(paths)
        self.is_writing = True
        try:
            with _without_crc32():
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
        if self._group.is_rank_zero and any(one is not None for one in expected):
            # not under its name yet
            manifest = replace(request.manifest, files=digests)
            check_saved(request.temporary, manifest, expected)
        return digests

    def _commit(self, request: CommitRequest, digests: dict[str, Digest]) -> SaveResult:
        manifest = commit_checkpoint(self._directory, self._lock, request, digests)
        path = self._directory.root / manifest.name
        result = _timed(
            SaveResult(manifest.step, ok=True, nbytes=manifest.nbytes, path=path), request
        )
        self._record(result)
        return result

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

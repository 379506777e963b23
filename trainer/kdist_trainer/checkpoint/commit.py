"""Commits a written checkpoint so that a crash at any point leaves the old one or the new one, and
prunes old checkpoints.

The tensor files are synced before the commit begins. The commit writes the state, the manifest and
the directory entries, checks the lock, renames the folder, syncs its parent, checks the lock again
and updates LATEST; only then is the checkpoint acknowledged. Pruning keeps the newest `keep`, which
may have to be some time apart, the one that LATEST names, and the newest few damaged ones;
leftovers of interrupted saves are deleted unless the writer of a later epoch may own them. Free of
torch.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.lock import Lock, LockLostError
from kdist_trainer.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    Manifest,
    UnsupportedCheckpointError,
    check_sizes,
    read_raw_manifest,
)
from kdist_trainer.checkpoint.state_json import UnloadableStateError
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.digest import Digest
from kdist_trainer.metrics.step_stats import StepStats
from kdist_trainer.object_store.store import ObjectPath

DROPPED: Final = "dropped"
"""The cause of a save that was not wanted any more, which is no failure."""


@dataclass(frozen=True)
class CommitRequest:
    """What one save commits besides the tensors."""

    manifest: Manifest
    """Without files: they are added when they are written."""
    state: bytes
    """Content of `state.json`."""
    temporary: StoragePath
    """Folder that the files are written to before the commit."""
    started: float
    """In seconds of the monotonic clock."""
    visible_seconds: float | None = None
    """How long the training was blocked; None if it is blocked until the end."""
    before_commit: Callable[[], None] | None = None
    """Called on rank 0 before the commit."""


@dataclass(frozen=True)
class Save:
    """A save that was started."""

    step: int
    visible_seconds: float
    """How long the training was blocked."""
    waited: bool
    """Whether the previous save was still running."""


@dataclass(frozen=True)
class SaveResult:
    """The result of a save, the same on every rank. Seconds are wall time."""

    step: int
    ok: bool
    cause: str = ""  # "", enospc, eio, timeout, superseded, dropped, unloadable or other
    error: str = ""
    visible_seconds: float = 0.0
    total_seconds: float = 0.0
    nbytes: int = 0
    """Bytes of all files."""
    path: StoragePath | None = None
    secondary: bool = False
    """Whether it failed because other ranks are gone, and not because of the disk."""

    def add_to(self, stats: StepStats) -> None:
        """Count it in the metrics of a rank."""
        stats.add_checkpoint(
            "save",
            cause=None if self.ok else self.cause,
            visible=self.visible_seconds,
            total=self.total_seconds,
            nbytes=self.nbytes,
            step=self.step,
        )


class UnsettledCommitError(OSError):
    """A checkpoint may be committed or not; its files must stay."""


def commit_checkpoint(
    directory: CheckpointDirectory,
    lock: Lock,
    request: CommitRequest,
    digests: Mapping[str, Digest],
) -> Manifest:
    """Commit the folder of tensor files `request.temporary`.

    Args:
        directory: the checkpoint folder.
        lock: its lock, which this process must hold.
        request: what to commit.
        digests: of the tensor files, by name.

    Returns:
        The manifest as written.

    Raises:
        DamagedCheckpointError: a file is not there; nothing is acknowledged.
        LockLostError: another group has the lock; nothing is acknowledged.
        OSError: the disk failed; nothing is acknowledged.
    """
    folder = request.temporary
    storage.make_folder(folder)  # DCP creates it only if there are tensors
    state = storage.write_new(folder / STATE, request.state)
    manifest = replace(request.manifest, files={**digests, STATE: state})
    check_sizes(folder, manifest.files)  # where a rank has written elsewhere, nothing is committed
    target = directory.root / manifest.name
    if isinstance(folder, Path):
        assert isinstance(target, Path)  # noqa: S101 - as all of the folder
        storage.write_new(folder / MANIFEST, manifest.to_bytes())
        storage.sync_folder(folder)
        if request.before_commit is not None:
            request.before_commit()
        _archive_target(target)
        lock.check()
        storage.rename(folder, target)
        storage.sync_folder(directory.root)
    else:
        manifest = replace(manifest, folder=folder.name)
        if request.before_commit is not None:
            request.before_commit()
        lock.check()
        _put_manifest(target / MANIFEST, manifest.to_bytes())
    lock.check()
    directory.write_latest(manifest.name)
    return manifest


def _put_manifest(path: StoragePath, data: bytes) -> None:
    """Create a manifest in an object store, which makes its checkpoint a committed one.

    Always on a condition: a request that was given up may still reach the store, and must not
    replace what a later attempt has committed.

    Raises:
        UnsettledCommitError: It may be there or not.
    """
    try:
        try:
            storage.write_new(path, data, exclusive=True)
        except FileExistsError:
            # of an earlier attempt of the same save, not acknowledged: nobody else has this epoch
            storage.replace_existing(path, data)
    except OSError as error:
        raise UnsettledCommitError(error.errno, f"{path} may not be committed: {error}") from error


def _archive_target(target: Path) -> None:
    """Rename what an earlier attempt of the same save left without being acknowledged."""
    if target.exists():
        stale = target.with_name(f"{target.name}.tmp-retried")
        storage.remove_tree(stale)
        storage.rename(target, stale)


def discard(directory: CheckpointDirectory, request: CommitRequest) -> None:
    """Remove the files of a failed save, unless a checkpoint may consist of them. Never raises
    `OSError`.
    """
    with suppress(OSError):
        if isinstance(request.temporary, Path) or not _has_manifest(directory, request):
            storage.remove_tree(request.temporary)


def _has_manifest(directory: CheckpointDirectory, request: CommitRequest) -> bool:
    """Whether the save has come as far as its manifest. Raises `OSError`."""
    path = directory.root / request.manifest.name / MANIFEST
    return isinstance(path, ObjectPath) and path.exists()


def cause_of(error: BaseException) -> str:
    """The cause of a failed save, as the metrics count it."""
    if isinstance(error, LockLostError):
        return "superseded"
    if isinstance(error, UnloadableStateError):
        return "unloadable"
    if isinstance(error, TimeoutError):
        return "timeout"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "enospc"
    return "eio" if number == errno.EIO else "other"


KEEP_DAMAGED = 3
OLD_SECONDS = 3600


def prune(directory: CheckpointDirectory, lock: Lock, *, keep: int, apart: float = 0.0) -> None:
    """Remove old checkpoints after a commit; the caller holds the lock. Never raises `OSError`.

    Args:
        directory: the checkpoint folder.
        lock: its lock, which says what is valid.
        keep: how many valid checkpoints stay.
        apart: seconds that must lie between those that stay besides the newest one.
    """
    with suppress(OSError):
        committed = directory.committed()
        valid = lock.valid(committed)
        named = directory.named()
        retained = {one.path for one in _select(valid, keep=keep, apart=apart)} | {
            one.path for one in committed if one.name == named
        }
        for one in committed:
            if one.path not in retained:
                _discard(directory, one)
        for one in directory.damaged()[KEEP_DAMAGED:]:
            _discard(directory, one)


def _select(valid: list[Checkpoint], *, keep: int, apart: float) -> list[Checkpoint]:
    """The newest checkpoint and the older ones that stay with it, of all valid ones, newest first.

    Each is the first one that is far enough from the one before it: so the oldest stays until
    others have become old, however often a run saves. One whose time is not known is no history.
    """
    if apart <= 0 or keep == 1:
        return valid[:keep]
    history: list[Checkpoint] = []
    latest = -math.inf
    for one in reversed(valid[1:]):
        at = storage.modified_at(one.path / MANIFEST)
        if at is not None and at - latest >= apart:
            history.append(one)
            latest = at
    return [*valid[:1], *history[1 - keep :]]


def clean_stale(
    directory: CheckpointDirectory, *, before: int, spared: Collection[str] = ()
) -> None:
    """Remove temporary files of earlier epochs; called before the first save of an epoch. Folders
    with the names in `spared` are still written to.

    Never raises `OSError`.
    """
    with suppress(OSError):
        for one in directory.temporary():
            if one.epoch < before and one.path.name not in spared:
                storage.remove_tree(one.path)
        for path in directory.loose_files():
            # a newer one may be in use
            if time.time() - path.stat().st_mtime > OLD_SECONDS:
                storage.remove(path)


def archive_checkpoint(directory: CheckpointDirectory, checkpoint: Checkpoint) -> None:
    """Rename a damaged checkpoint, so that it is not loaded and stays as evidence. Raises
    `OSError`.
    """
    taken = {one.path.name for one in directory.damaged()}
    name, number = f"{checkpoint.name}.damaged", 1
    while name in taken:
        number += 1
        name = f"{checkpoint.name}.damaged-{number}"
    path = checkpoint.path
    target = path.with_name(name)
    if isinstance(path, Path):
        assert isinstance(target, Path)  # noqa: S101 - as all of the folder
        storage.rename(path, target)
        storage.sync_folder(target.parent)
    else:
        storage.write_new(target / MANIFEST, (path / MANIFEST).read_bytes())
        storage.remove(path / MANIFEST)


def _discard(directory: CheckpointDirectory, checkpoint: Checkpoint) -> None:
    """Make a checkpoint invisible, then remove it: a crash must not leave part of it under its
    name. In an object store files stay that another checkpoint names: a save that was committed
    again, under the lock of a later group.
    """
    path = checkpoint.path
    with suppress(OSError):
        if isinstance(path, Path):
            stale = path.with_name(f"{path.name}.tmp-pruned")
            storage.remove_tree(stale)
            storage.rename(path, stale)
            storage.sync_folder(stale.parent)
            storage.remove_tree(stale)
            return
        files: StoragePath | None = None
        with suppress(DamagedCheckpointError, UnsupportedCheckpointError):
            files = read_raw_manifest(path).locate(path)
        storage.remove(path / MANIFEST)
        if files is not None and files.name not in directory.used_folders():
            storage.remove_tree(files)

"""Commits a written checkpoint so that a crash at any point leaves the old one or the new one, and
prunes old checkpoints.

The tensor files are synced before the commit begins. The commit writes the state, the manifest and
the directory entries, checks the lock, renames the folder, syncs its parent, checks the lock again
and updates LATEST; only then is the checkpoint acknowledged. Pruning keeps the newest `keep`, the
one that LATEST names, and the newest few damaged ones; leftovers of interrupted saves are deleted
unless the writer of a later epoch may own them. Free of torch.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.digest import Digest
from kdist_trainer.checkpoint.layout import (
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointDirectory,
    Manifest,
)
from kdist_trainer.checkpoint.lock import Lock, LockLostError
from kdist_trainer.metrics.step_stats import StepStats


@dataclass(frozen=True)
class CommitRequest:
    """What one save commits besides the tensors."""

    manifest: Manifest
    """Without files: they are added when they are written."""
    state: bytes
    """Content of `state.json`."""
    temporary: Path
    """Folder that the files are written to before the commit."""
    started: float
    """In seconds of the monotonic clock."""
    visible_seconds: float | None = None
    """How long the training was blocked; None if it is blocked until the end."""
    before_commit: Callable[[], None] | None = None
    """Called on rank 0 before the commit."""


@dataclass(frozen=True)
class SaveResult:
    """The result of a save, the same on every rank. Seconds are wall time."""

    step: int
    ok: bool
    cause: str = ""  # "", enospc, eio, timeout, superseded or other
    error: str = ""
    visible_seconds: float = 0.0
    total_seconds: float = 0.0
    nbytes: int = 0
    """Bytes of all files."""
    path: Path | None = None
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
        LockLostError: another group has the lock; nothing is acknowledged.
        OSError: the disk failed; nothing is acknowledged.
    """
    folder = request.temporary
    storage.make_folder(folder)  # DCP creates it only if there are tensors
    state = storage.write_new(folder / STATE, request.state)
    manifest = replace(request.manifest, files={**digests, STATE: state})
    storage.write_new(folder / MANIFEST, manifest.to_bytes())
    storage.sync_folder(folder)
    if request.before_commit is not None:
        request.before_commit()
    target = directory.root / manifest.name
    _archive_target(target)
    lock.check()
    storage.rename(folder, target)
    storage.sync_folder(directory.root)
    lock.check()
    directory.write_latest(target.name)
    return manifest


def _archive_target(target: Path) -> None:
    """Rename what an earlier attempt of the same save left without being acknowledged."""
    if target.exists():
        stale = target.with_name(f"{target.name}.tmp-retried")
        storage.remove_tree(stale)
        storage.rename(target, stale)


def discard(request: CommitRequest) -> None:
    """Remove the files of a failed save. Never raises `OSError`."""
    with suppress(OSError):
        storage.remove_tree(request.temporary)


def cause_of(error: BaseException) -> str:
    """The cause of a failed save, as the metrics count it."""
    if isinstance(error, LockLostError):
        return "superseded"
    if isinstance(error, TimeoutError):
        return "timeout"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "enospc"
    return "eio" if number == errno.EIO else "other"


KEEP_DAMAGED = 3
OLD_SECONDS = 3600


def prune(directory: CheckpointDirectory, lock: Lock, *, keep: int) -> None:
    """Remove old checkpoints after a commit; the caller holds the lock. Never raises `OSError`.

    Args:
        directory: the checkpoint folder.
        lock: its lock, which says what is valid.
        keep: how many valid checkpoints stay.
    """
    with suppress(OSError):
        committed = directory.committed()
        valid = lock.valid(committed)
        named = directory.named()
        retained = {one.path for one in valid[:keep]} | {
            one.path for one in committed if one.name == named
        }
        for one in committed:
            if one.path not in retained:
                _discard(one)
        for one in directory.damaged()[KEEP_DAMAGED:]:
            storage.remove_tree(one.path)


def clean_stale(directory: CheckpointDirectory, *, epoch: int) -> None:
    """Remove temporary files of this epoch and of earlier ones; called before its first save.

    Never raises `OSError`.
    """
    with suppress(OSError):
        for one in directory.temporary():
            if one.epoch <= epoch:
                storage.remove_tree(one.path)
        for path in directory.loose_files():
            # a newer one may be in use
            if time.time() - path.stat().st_mtime > OLD_SECONDS:
                storage.remove(path)


def archive_checkpoint(checkpoint: Checkpoint) -> None:
    """Rename a damaged checkpoint, so that it is not loaded and stays as evidence. Raises
    `OSError`.
    """
    target = checkpoint.path.with_name(f"{checkpoint.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.path.with_name(f"{checkpoint.name}.damaged-{number}")
    storage.rename(checkpoint.path, target)
    storage.sync_folder(target.parent)


def _discard(checkpoint: Checkpoint) -> None:
    """Rename a checkpoint, then remove it: a crash must not leave part of it under its name."""
    with suppress(OSError):
        stale = checkpoint.path.with_name(f"{checkpoint.name}.tmp-pruned")
        storage.remove_tree(stale)
        storage.rename(checkpoint.path, stale)
        storage.sync_folder(stale.parent)
        storage.remove_tree(stale)

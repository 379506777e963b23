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

from kdist_trainer.checkpoint import durable_files
from kdist_trainer.checkpoint.durable_files import Digest
from kdist_trainer.checkpoint.layout import (
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointDirectory,
    Manifest,
)
from kdist_trainer.checkpoint.lock import Lock, LockLostError


@dataclass(frozen=True)
class CommitRequest:
    """One save: what is committed besides the tensors.

    `manifest` has no files yet; `state` is the content of `state.json`; `started` is of the
    monotonic clock; `visible_seconds` is how long the training stood still, None when it stands
    still to the end.
    """

    manifest: Manifest
    state: bytes
    temporary: Path
    started: float
    visible_seconds: float | None = None
    before_commit: Callable[[], None] | None = None


@dataclass(frozen=True)
class SaveResult:
    """What became of a save; the same on every rank. Seconds are wall time, `nbytes` counts all
    files.
    """

    step: int
    ok: bool
    cause: str = ""  # "", enospc, eio, timeout, superseded or other
    error: str = ""
    visible_seconds: float = 0.0
    total_seconds: float = 0.0
    nbytes: int = 0
    path: Path | None = None
    echo: bool = False
    """Whether it failed because other ranks are gone: no disk is to blame."""


def commit_checkpoint(
    directory: CheckpointDirectory,
    lock: Lock,
    request: CommitRequest,
    digests: Mapping[str, Digest],
) -> Manifest:
    """Commit the folder of tensor files that `request.temporary` is. Returns the manifest as
    written.

    Raises `LockLostError` when another group has the lock, `OSError` when the disk fails: nothing
    is acknowledged then.
    """
    folder = request.temporary
    durable_files.make_folder(folder)  # torch made it, unless there was no tensor
    state = durable_files.write_new(folder / STATE, request.state)
    manifest = replace(request.manifest, files={**digests, STATE: state})
    durable_files.write_new(folder / MANIFEST, manifest.to_bytes())
    durable_files.sync_folder(folder)
    if request.before_commit is not None:
        request.before_commit()
    target = directory.root / manifest.name
    _archive_target(target)
    lock.check()
    durable_files.rename(folder, target)
    durable_files.sync_folder(directory.root)
    lock.check()
    directory.write_latest(target.name)
    return manifest


def _archive_target(target: Path) -> None:
    """Put aside what an earlier try of this very save left under its name after it had failed to be
    acknowledged.
    """
    if target.exists():
        stale = target.with_name(f"{target.name}.tmp-retried")
        durable_files.remove_tree(stale)
        durable_files.rename(target, stale)


def discard(request: CommitRequest) -> None:
    """Remove what a failed save left. Never raises `OSError`."""
    with suppress(OSError):
        durable_files.remove_tree(request.temporary)


def cause_of(error: BaseException) -> str:
    """The bounded word under which a failed save is counted."""
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
    """Remove what need not be kept; called by the holder of the lock after a commit. Never raises
    `OSError`.
    """
    with suppress(OSError):
        committed = directory.committed()
        valid = lock.valid(committed)
        named = directory.named()
        kept = {one.path for one in valid[:keep]} | {
            one.path for one in committed if one.name == named
        }
        for one in committed:
            if one.path not in kept:
                _discard(one)
        for one in directory.damaged()[KEEP_DAMAGED:]:
            durable_files.remove_tree(one.path)


def clean_stale(directory: CheckpointDirectory, *, epoch: int) -> None:
    """Remove temporary files of this epoch and all before it: called before its first save.

    Never raises `OSError`.
    """
    with suppress(OSError):
        for one in directory.temporary():
            if one.epoch <= epoch:
                durable_files.remove_tree(one.path)
        for path in directory.loose_files():
            # a younger one may be in use this moment
            if time.time() - path.stat().st_mtime > OLD_SECONDS:
                durable_files.remove(path)


def archive_checkpoint(checkpoint: Checkpoint) -> None:
    """Keep a damaged checkpoint as evidence, out of the way of whoever looks for one to load.
    Raises `OSError`.
    """
    target = checkpoint.path.with_name(f"{checkpoint.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = checkpoint.path.with_name(f"{checkpoint.name}.damaged-{number}")
    durable_files.rename(checkpoint.path, target)
    durable_files.sync_folder(target.parent)


def _discard(checkpoint: Checkpoint) -> None:
    """Take the committed name away first: a crash in the middle must not leave half a checkpoint
    under it.
    """
    with suppress(OSError):
        stale = checkpoint.path.with_name(f"{checkpoint.name}.tmp-pruned")
        durable_files.remove_tree(stale)
        durable_files.rename(checkpoint.path, stale)
        durable_files.sync_folder(stale.parent)
        durable_files.remove_tree(stale)

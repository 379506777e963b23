"""The order in which a checkpoint becomes the one to resume from; any crash leaves the old one or the new one. Free of torch.

All files of the tensors are synced when this begins. Then: the state, the manifest, the folder's names, a look at the lock,
the rename, the parent's names, another look at the lock, LATEST. Only after that is the checkpoint acknowledged.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kdist_trainer.checkpoint import files
from kdist_trainer.checkpoint.files import Digest
from kdist_trainer.checkpoint.layout import MANIFEST, STATE, CheckpointDirectory
from kdist_trainer.checkpoint.lock import Lock, Superseded
from kdist_trainer.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Request:
    """One save: what is committed besides the tensors.

    `manifest` has no files yet; `state` is the content of `state.json`; `started` is of the monotonic clock;
    `visible_seconds` is how long the training stood still, None when it stands still to the end.
    """

    manifest: Manifest
    state: bytes
    temporary: Path
    started: float
    visible_seconds: float | None = None
    before_commit: Callable[[], None] | None = None


@dataclass(frozen=True)
class SaveResult:
    """What became of a save; the same on every rank. Seconds are wall time, `nbytes` counts all files."""

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


def commit(directory: CheckpointDirectory, lock: Lock, request: Request, digests: Mapping[str, Digest]) -> Manifest:
    """Commit the folder of tensor files that `request.temporary` is. Returns the manifest as written.

    Raises `Superseded` when another group has the lock, `OSError` when the disk fails: nothing is acknowledged then.
    """
    folder = request.temporary
    files.make_folder(folder)  # torch made it, unless there was no tensor
    state = files.write_new(folder / STATE, request.state)
    manifest = replace(request.manifest, files={**digests, STATE: state})
    files.write_new(folder / MANIFEST, manifest.to_bytes())
    files.sync_folder(folder)
    if request.before_commit is not None:
        request.before_commit()
    target = directory.root / manifest.name
    _make_way(target)
    lock.check()
    files.rename(folder, target)
    files.sync_folder(directory.root)
    lock.check()
    directory.write_latest(target.name)
    return manifest


def _make_way(target: Path) -> None:
    """Put aside what an earlier try of this very save left under its name after it had failed to be acknowledged."""
    if target.exists():
        litter = target.with_name(f"{target.name}.tmp-retried")
        files.remove_tree(litter)
        files.rename(target, litter)


def discard(request: Request) -> None:
    """Remove what a failed save left. Never raises `OSError`."""
    with suppress(OSError):
        files.remove_tree(request.temporary)


def cause_of(error: BaseException) -> str:
    """The bounded word under which a failed save is counted."""
    if isinstance(error, Superseded):
        return "superseded"
    if isinstance(error, TimeoutError):
        return "timeout"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "enospc"
    return "eio" if number == errno.EIO else "other"

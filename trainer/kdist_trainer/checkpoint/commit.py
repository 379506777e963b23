"""Commits a written checkpoint so that a crash at any point leaves the old one or the new one, and
prunes old checkpoints. Free of torch.

The tensor files are synced before the commit begins. The commit writes the state, the manifest and
the directory entries, checks the lock, renames the folder, syncs its parent, checks the lock again
and updates LATEST; only then is the checkpoint acknowledged. `Membership` says under whose lock a
save is committed that is in progress while its rank changes groups.

Pruning keeps what `select_kept` selects, the one that LATEST names, and the newest few damaged
ones; leftovers of interrupted saves are deleted unless the writer of a later epoch may own them.
Saves that a lost rank has cut short are counted in the ledger: after two in a row the next save
blocks (`SaveClock.must_block`).

Before a group starts, `write_token` tries whether the storage supports all of this.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock, LockLostError, LockRecord
from kdist_trainer.checkpoint.manifest import (
    MANIFEST,
    MAX_BYTES,
    STATE,
    Checkpoint,
    CheckpointDirectory,
    DamagedCheckpointError,
    Manifest,
    UnloadableStateError,
    UnsupportedCheckpointError,
    check_sizes,
    read_raw_manifest,
)
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Best, Keep
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import checkpoint_name
from kdist_trainer.formats.digest import Digest
from kdist_trainer.formats.untrusted_text import finite_number, number_of
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.object_store.errors import ObjectChangedError
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
    """Commit the folder of tensor files `request.temporary`, which have these digests; returns the
    manifest as written. This process must hold the lock.

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
        if target.exists():  # left by an earlier attempt of the same save, and not acknowledged
            stale = target.with_name(f"{target.name}.tmp-retried")
            storage.remove_tree(stale)
            storage.rename(target, stale)
        lock.check()
        storage.rename(folder, target)
        storage.sync_folder(directory.root)
    else:
        assert isinstance(target, ObjectPath)  # noqa: S101 - as all of the folder
        manifest = replace(manifest, folder=folder.name)
        if request.before_commit is not None:
            request.before_commit()
        lock.check()
        _put_manifest(target / MANIFEST, manifest.to_bytes())
    lock.check()
    directory.write_latest(manifest.name)
    return manifest


def _put_manifest(path: ObjectPath, data: bytes) -> None:
    """Create a manifest in an object store, which makes its checkpoint a committed one.

    Always on a condition: a request that was given up may still reach the store, and must not
    replace what a later attempt has committed. Raises `UnsettledCommitError` if it may be there or
    not.
    """
    try:
        try:
            storage.write_new(path, data, exclusive=True)
        except FileExistsError:
            # of an earlier attempt of the same save, not acknowledged: nobody else has this epoch
            path.store.replace(path.key, data, path.store.get(path.key, MAX_BYTES).tag)
    except OSError as error:
        raise UnsettledCommitError(error.errno, f"{path} may not be committed: {error}") from error


def discard(directory: CheckpointDirectory, request: CommitRequest) -> None:
    """Remove the files of a failed save, unless a checkpoint may consist of them. Never raises
    `OSError`.
    """
    with suppress(OSError):
        manifest = directory.root / request.manifest.name / MANIFEST
        # on a disk the files have another folder until the commit, which renames it
        if isinstance(manifest, Path) or not manifest.exists():
            storage.remove_tree(request.temporary)


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


def prune(directory: CheckpointDirectory, lock: Lock, *, keep: Keep, apart: float = 0.0) -> None:
    """Remove old checkpoints after a commit; the caller holds the lock. The last ones besides the
    newest one must be so many seconds `apart`. Never raises `OSError` or `ValueError`.
    """
    with suppress(OSError, ValueError):  # a newer version has written the ledger: all stay
        evaluated = RunLedger(directory.root).events() if keep.best is not None else ()
        committed = directory.committed()
        valid = lock.valid(committed)
        named = directory.named()
        retained = select_kept(valid, evaluated, keep=keep, apart=apart)
        for one in committed:
            if one.name not in retained and one.name != named:
                _discard(directory, one)
        for one in directory.damaged()[KEEP_DAMAGED:]:
            _discard(directory, one)


Event = Mapping[str, Any]


def select_kept(
    valid: Sequence[Checkpoint], events: Iterable[Event], *, keep: Keep, apart: float = 0.0
) -> dict[str, list[str]]:
    """The names of the checkpoints that stay, each with the fields of `keep` that it stays for, of
    all that count, newest first. The ledger's events, oldest first, are only read for the best
    evaluation. `apart` is as in `prune`.
    """
    found = {one.name: ["last"] for one in _select_last(valid, keep.last, apart)}
    oldest_first = list(reversed(valid))
    if keep.best is not None and valid:
        best = find_best(events, keep.best, until=valid[0].step)
        first = next((one for one in oldest_first if best and one.step >= best[0]), None)
        if first is not None:
            found.setdefault(first.name, []).append("best")
    if keep.every is not None:
        passed = 0
        for one in oldest_first:
            if one.step // keep.every > passed:
                passed = one.step // keep.every
                found.setdefault(one.name, []).append("every")
    return found


def _select_last(valid: Sequence[Checkpoint], count: int, apart: float) -> Sequence[Checkpoint]:
    """The newest checkpoint and the older ones that stay with it.

    Each is the first one that is far enough from the one before it: so the oldest stays until
    others have become old, however often a run saves. One whose time is not known is no history.
    """
    if apart <= 0 or count == 1:
        return valid[:count]
    history: list[Checkpoint] = []
    latest = -math.inf
    for one in reversed(valid[1:]):
        at = storage.modified_at(one.path / MANIFEST)
        if at is not None and at - latest >= apart:
            history.append(one)
            latest = at
    return [*valid[:1], *history[1 - count :]]


def find_best(events: Iterable[Event], best: Best, *, until: int) -> tuple[int, float] | None:
    """Step and value of the first best evaluation up to a step, which is committed: what was
    evaluated beyond it may have to be trained again. Of one step the last evaluation counts.
    """
    values: dict[int, float] = {}
    for event in events:
        evaluated = event if event.get("event") == "evaluated" else event.get("best")
        metrics = evaluated.get("metrics") if isinstance(evaluated, Mapping) else None
        if isinstance(evaluated, Mapping) and isinstance(metrics, Mapping):
            step, value = evaluated.get("step"), finite_number(metrics.get(best.metric))
            if type(step) is int and step <= until and value is not None:
                values[step] = value
    choose = min if best.goal == "min" else max
    return choose(sorted(values.items()), key=lambda one: one[1], default=None)


def note_kept(ledger: RunLedger, step: int, *, keep: Keep, apart: float) -> dict[str, Any]:
    """What the line of a commit says besides; nothing if a number says what is kept. Raises
    `OSError`.
    """
    if keep.is_number:
        return {}
    noted: dict[str, Any] = {"keep": keep.model_dump(mode="json", by_alias=True), "apart": apart}
    best = None if keep.best is None else find_best(ledger.events(), keep.best, until=step)
    if keep.best is not None and best is not None:
        noted["best"] = {"step": best[0], "metrics": {keep.best.metric: best[1]}}
    return noted


def explain_kept(valid: Sequence[Checkpoint], ledger: RunLedger) -> dict[str, list[str]]:
    """Why each checkpoint stays, by its name, as the newest commit has noted it; empty if a number
    says what is kept. Raises `OSError`.
    """
    events = ledger.events()
    commits = [one for one in events if one["event"] == "commit"]
    if not commits or "keep" not in commits[-1]:
        return {}
    try:
        keep = Keep.model_validate(commits[-1]["keep"], by_alias=True)
    except ValidationError:  # a newer version has more to say
        return {}
    return select_kept(valid, events, keep=keep, apart=number_of(commits[-1], "apart"))


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


CUT_EVENT: Final = "save_cut"
"""Name of the event in the run's ledger."""


def record_cut(ledger: RunLedger, *, step: int, folder: str) -> None:
    """Note that the save into `folder` was cut. Never raises `OSError`: what cannot be counted only
    makes a later save wait a little longer for its turn to block.
    """
    with suppress(OSError):
        ledger.append(CUT_EVENT, step=step, folder=folder)


def record_leftovers(directory: CheckpointDirectory, lock: Lock, *, spared: Iterable[str]) -> None:
    """Note the saves whose folders are left, before these are removed; those named in `spared` are
    still written to. Never raises `OSError`.
    """
    with suppress(OSError):
        left = [one for one in directory.temporary() if one.path.name not in spared]
        if not left:
            return
        newest = lock.find_newest()
        ledger = RunLedger(directory.root)
        known = {one.get("folder") for one in ledger.events() if one["event"] == CUT_EVENT}
        for one in left:
            is_newer = newest is None or one.step > newest.step
            if is_newer and one.path.name not in known:
                record_cut(ledger, step=one.step, folder=one.path.name)


def count_cuts(events: Iterable[Mapping[str, Any]]) -> int:
    """How many saves in a row were cut since the last commit, by the events, oldest first."""
    cut: set[Any] = set()
    for event in events:
        if event.get("event") == "commit":
            cut.clear()
        elif event.get("event") == CUT_EVENT:
            cut.add(event.get("folder"))
    return len(cut)


class SaveDroppedError(Exception):
    """The save is no longer wanted."""


class Membership:
    """Says under whose lock one save may be committed. Thread-safe.

    A rank leaves its group without waiting for the storage: the lock of the next group keeps a
    commit from counting that comes later. The writer then commits again, under that lock.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._record: LockRecord | None = None
        self.is_dropped = False
        self._is_committing = False
        self.is_committed = False

    def set(self, record: LockRecord | None) -> None:
        """Be a member of the group with this lock; None for no group."""
        with self._changed:
            self._record = record
            self._changed.notify_all()

    def drop(self) -> bool:
        """Have the save not be committed; returns whether it is already. If it is just being
        committed by the group that the rank is a member of, that is waited for.
        """
        with self._changed:
            self.is_dropped = True
            self._changed.notify_all()
            if self._record is not None:
                self._changed.wait_for(lambda: not self._is_committing)
            return self.is_committed

    def begin_commit(self) -> LockRecord:
        """Wait for a group. Raises `SaveDroppedError`."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_dropped or self._record is not None)
            if self.is_dropped or self._record is None:
                raise SaveDroppedError
            self._is_committing = True
            return self._record

    def end_commit(self, *, is_committed: bool) -> None:
        """Take in how an attempt has ended; may be called without one."""
        with self._changed:
            self._is_committing = False
            self.is_committed |= is_committed
            self._changed.notify_all()

    def has_left(self, record: LockRecord) -> bool:
        """Whether the rank is no member any more of the group with this lock."""
        with self._changed:
            return self._record is None or self._record.holder != record.holder


class Token(NamedTuple):
    """A file that rank 0 has written, for the others to look for. Its name is new each time, so no
    cache of a network file system can have an answer for it.
    """

    name: str
    text: str


def write_token(root: StoragePath, *, is_new: bool = False) -> Token:
    """Write a token into the folder, which is created. `is_new` says whether to find out first
    whether the file system has what checkpoints need, which takes a dozen syncs of the disk.

    Raises:
        OSError: the folder cannot be written.
        CheckpointMismatchError: the file system lacks something that checkpoints need.
    """
    token = Token(f"probe-{secrets.token_hex(8)}", secrets.token_hex(16))
    storage.make_folder(root, durable=True)
    if is_new and isinstance(root, Path):
        check_file_system(root)
    elif is_new and isinstance(root, ObjectPath):
        check_conditions(root / token.name)
    try:
        storage.write_new(root / token.name, token.text.encode(), exclusive=True)
    except OSError:
        remove_token(root, token)  # without content
        raise
    return token


def read_token(root: StoragePath, token: Token) -> bool:
    """Whether `root` is the folder that the token was written to."""
    try:
        return (root / token.name).read_text("ascii") == token.text
    except (OSError, UnicodeDecodeError):
        return False


def remove_token(root: StoragePath, token: Token) -> None:
    """Remove it. Never raises `OSError`: it is removed later otherwise."""
    with suppress(OSError):
        storage.remove(root / token.name)


def check_conditions(path: ObjectPath) -> None:
    """Find out whether an object store honors the conditions that the lock and commits need, by an
    object that does not exist, and does not afterwards.

    Raises:
        CheckpointMismatchError: it replaces what must not be replaced.
        OSError: it failed.
    """
    store, key = path.store, path.key
    stale = store.put_new(key, b"first")
    try:
        ignored = None
        with suppress(FileExistsError):
            store.put_new(key, b"second")
            ignored = "If-None-Match"
        if ignored is None:
            store.replace(key, b"third", stale)
            with suppress(ObjectChangedError):
                store.replace(key, b"fourth", stale)
                ignored = "If-Match"
    finally:
        store.delete(key)
    if ignored is not None:
        raise CheckpointMismatchError(
            f"the object store of {path.parent} ignores {ignored}, which checkpoints need: use one "
            "that honors it (S3 since November 2024, MinIO, Ceph, GCS, Azure), or a volume"
        )


def check_file_system(root: Path) -> None:
    """Try every operation of a save and of the ledger once, in a temporary folder.

    Raises:
        CheckpointMismatchError: the file system does not support an operation.
        OSError: the disk is full or broken, which may be temporary.
    """
    # named like a save's folder: it is cleaned up later if this process dies here
    stale = checkpoint_name(0, 0) + ".tmp-probe-" + secrets.token_hex(4)
    before, after = root / stale, root / f"{stale}-renamed"
    try:
        for operation, attempt in _OPERATIONS.items():
            try:
                works = attempt(before, after)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                works, why = False, f" ({error.strerror})"
            else:
                why = ""
            if not works:
                raise CheckpointMismatchError(
                    f"the file system of the checkpoint folder {root} cannot "
                    f"{operation}{why}, which checkpoints need: use a "
                    "volume with a POSIX file system (a disk, NFS, CephFS, Lustre), not "
                    "an object store behind FUSE"
                )
    finally:
        for folder in (before, after):
            with suppress(OSError):
                storage.remove_tree(folder)


_UNSUPPORTED = (
    errno.EPERM,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.ENOTEMPTY,
    errno.EISDIR,
)
"""Errors that a file system would report again."""


def _writes_and_syncs(before: Path, _: Path) -> bool:
    storage.make_folder(before)
    storage.write_new(before / "file", b"probe")
    storage.sync_folder(before)
    return (before / "file").read_bytes() == b"probe"


def _creates_once(before: Path, _: Path) -> bool:
    storage.write_new(before / "claim", b"", exclusive=True)
    try:
        storage.write_new(before / "claim", b"", exclusive=True)
    except FileExistsError:
        return True
    return False


def _appends(before: Path, _: Path) -> bool:
    for line in (b"one\n", b"two\n"):
        with (before / "lines").open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())
    return (before / "lines").read_bytes() == b"one\ntwo\n"


def _replaces(before: Path, _: Path) -> bool:
    storage.replace(before / "file", b"other")
    return (before / "file").read_bytes() == b"other"


def _renames(before: Path, after: Path) -> bool:
    storage.rename(before, after)
    return not before.exists() and (after / "file").read_bytes() == b"other"


_OPERATIONS: Final[Mapping[str, Callable[[Path, Path], bool]]] = {
    "write and fsync files and folders": _writes_and_syncs,
    "create a file only where there is none": _creates_once,
    "append to a file": _appends,
    "replace a file by another": _replaces,
    "rename a folder": _renames,
}

"""The lock of a checkpoint folder: fencing by epochs that only grow, so that a writer that was
paused cannot win. Free of torch.

A dead or sleeping holder blocks nobody: a later group of the run takes a higher epoch and continues
at once, and every writer checks the lock before it commits. An earlier writer may still be between
that check and its rename. Therefore a record also has a *fence*: the checkpoint that its group
started from. Checkpoints of earlier epochs beyond it came too late and are not valid.

Epochs grow within a folder, whichever runs have used it; generations grow within a run. The epoch
of a group is its generation, or higher if the folder has seen that epoch already.

On a file system each record is a file named by its epoch and created exclusively; the highest epoch
holds the lock. In an object store there is one object, which is only changed on the condition that
it still is what was read: of several that change it at once, one succeeds.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.manifest import Checkpoint, CheckpointDirectory, parse_name
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Cause
from kdist_trainer.errors import CheckpointMismatchError, KdistTrainerError
from kdist_trainer.formats import NewerFormatError, stamp, take_format
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.object_store.errors import ObjectChangedError
from kdist_trainer.object_store.store import ObjectPath, Tag

_RECORD = re.compile(r"e(\d{8,})\.json")
_KEEP = 3
_MOST_BYTES = 1 << 20


class LockLostError(KdistTrainerError):
    """A later worker group of the run has locked the folder; this one must end."""

    cause = Cause.NODE_LOST


@dataclass(frozen=True)
class LockRecord:
    """One worker group's right to write."""

    epoch: int
    run_id: str
    holder: str
    host: str = ""
    time: float = 0.0
    released: bool = False
    fences: tuple[tuple[int, str], ...] = ()
    """Of this group and of earlier ones: the epoch, and the checkpoint that the group started from
    ("" for none).
    """
    generation: int = 0

    def to_bytes(self) -> bytes:
        """The record as it is written."""
        return encode_json(stamp("lock", asdict(self))).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LockRecord | None:
        """The record that was written; None for anything else. Raises `CheckpointMismatchError` if
        a newer version wrote it.
        """
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            document: dict[str, Any] = parse_json(data)
            try:
                document = take_format("lock", document)
            except NewerFormatError as error:
                raise CheckpointMismatchError(f"the checkpoints are locked: {error}") from None
            fences = tuple((int(epoch), str(base)) for epoch, base in document.pop("fences"))
            # without one it was written by an earlier version, whose epochs were generations
            document.setdefault("generation", document["epoch"])
            return cls(**document, fences=fences)
        return None


class LockFiles:
    """The records of one folder's lock, in a folder: a crash may leave the file of a higher epoch
    empty. Every method raises `OSError` if the storage fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> tuple[int, LockRecord | None]:
        """The highest epoch that has been taken, 0 for none, and the newest complete record, which
        is of that epoch or of an earlier one.
        """
        epochs = self._epochs()
        for epoch in reversed(epochs):
            with suppress(FileNotFoundError):
                record = LockRecord.from_bytes(self._path(epoch).read_bytes())
                if record is not None:
                    return epochs[-1], record
        return epochs[-1] if epochs else 0, None

    def create(self, record: LockRecord) -> None:
        """Take the record's epoch. Raises `FileExistsError` if another has taken it, or any later
        one, since the records were read.
        """
        storage.make_folder(self.folder, durable=True)
        try:
            storage.write_new(self._path(record.epoch), record.to_bytes(), exclusive=True)
        except FileExistsError:
            raise
        except OSError:
            self.remove(record.epoch)  # our own, without content
            raise
        storage.sync_folder(self.folder)

    def rewrite(self, record: LockRecord) -> None:
        """Replace the record of the same epoch, which must be the last that was read. Raises
        `FileExistsError` if another has the lock meanwhile, as far as the storage can tell.
        """
        storage.replace(self._path(record.epoch), record.to_bytes())

    def remove(self, epoch: int) -> None:
        """Give an epoch back, which is to be taken again."""
        with suppress(FileNotFoundError):
            storage.remove(self._path(epoch))

    def prune(self) -> None:
        """Remove old records. Never raises `OSError`."""
        for epoch in self._epochs()[:-_KEEP]:
            with suppress(OSError):
                self.remove(epoch)

    def _epochs(self) -> list[int]:
        try:
            names = [entry.name for entry in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(_RECORD.fullmatch, names) if match)

    def _path(self, epoch: int) -> Path:
        return self.folder / f"e{epoch:08d}.json"


class LockObject:
    """The newest record in one object, with the methods of `LockFiles`."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._tag: Tag | None = None
        """Of what was read last."""

    def read(self) -> tuple[int, LockRecord | None]:
        """The record and its epoch. Raises `OSError` if the object is no record: nothing else is
        written there.
        """
        try:
            stored = self._path.store.get(self._path.key, _MOST_BYTES)
        except FileNotFoundError:
            self._tag = None
            return 0, None
        record = LockRecord.from_bytes(stored.data)
        if record is None:
            raise OSError(f"{self._path} is no lock")
        self._tag = stored.tag
        return record.epoch, record

    def create(self, record: LockRecord) -> None:
        """Create the object, or replace the record that was read last."""
        self.rewrite(record)

    def rewrite(self, record: LockRecord) -> None:
        """Replace the record that was read last."""
        store, key, data = self._path.store, self._path.key, record.to_bytes()
        if self._tag is None:
            self._tag = store.put_new(key, data)
            return
        try:
            self._tag = store.replace(key, data, self._tag)
        except ObjectChangedError as error:
            raise FileExistsError(str(error)) from error

    def remove(self, epoch: int) -> None:
        """Do nothing: the next record replaces this one."""

    def prune(self) -> None:
        """Do nothing: there is one record."""


_FENCES = 100


class Lock:
    """The lock of one checkpoint folder, as this process sees it."""

    def __init__(self, root: StoragePath) -> None:
        self._root = root
        self._records = (
            LockObject(root / "lock.json")
            if isinstance(root, ObjectPath)
            else LockFiles(root / "lock")
        )
        self._tried = ""
        """The holder of the record that `acquire` has tried to create last."""
        self.mine: LockRecord | None = None

    def acquire(
        self, *, run_id: str, generation: int, at_least: int = 0, take_over: bool = False
    ) -> LockRecord:
        """Lock the folder for this run, and return this group's record. A later generation of the
        same run takes over at once; `take_over` says whether to lock a folder that another run has
        not released. `at_least` is the lowest epoch to take. It may be called again after an error
        of the disk.

        Raises:
            CheckpointMismatchError: another run holds the folder.
            LockLostError: this generation or a later one of the same run has the lock.
            OSError: the disk failed.
        """
        highest, last = self._records.read()
        if self.mine is None and last is not None and last.holder == self._tried:
            self._records.rewrite(last)  # by a call that failed before it was durable
            self.mine = last
            self.check()
            return last
        if last is not None and last.run_id == run_id:
            # above it there may be records without content, which groups that crashed have left
            latest = last.generation + highest - last.epoch
            if generation == latest and last.released:
                self._records.remove(highest)
                highest -= 1
            elif generation <= latest:
                raise LockLostError(
                    f"generation {latest} of run {run_id} holds {self._root}, this group "
                    f"is of generation {generation}"
                )
        elif last is not None and not (last.released or take_over):
            raise CheckpointMismatchError(
                f"checkpoints in {self._root} belong to run {last.run_id} (on "
                f"{last.host}), not to {run_id}: "
                "wait until it has ended, choose another folder, or use --take-over"
            )
        record = LockRecord(
            max(generation, at_least, highest + 1),
            run_id,
            secrets.token_hex(8),
            socket.gethostname(),
            round(time.time(), 3),
            fences=last.fences if last is not None else (),
            generation=generation,
        )
        self._tried = record.holder
        self._create(record)
        self.check()
        return record

    def raise_epoch(self, epoch: int) -> None:
        """Hold the lock with this higher epoch. Raises `OSError` or `LockLostError`."""
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        self._create(replace(self.mine, epoch=epoch))
        self.check()

    def check(self) -> None:
        """Raise `LockLostError` if this process lost the lock, `OSError` if the disk fails."""
        if self.mine is None:
            raise LockLostError(f"{self._root} is not locked by this process")
        highest, last = self._records.read()
        if highest != self.mine.epoch:
            holder = f"epoch {highest} has taken it over" if highest else "its lock is gone"
            raise LockLostError(f"epoch {self.mine.epoch} lost {self._root}: {holder}")
        if last is None or last.holder != self.mine.holder:
            raise LockLostError(f"epoch {self.mine.epoch} of {self._root} was locked twice")

    def set_base(self, checkpoint: Checkpoint | None) -> None:
        """Fence off later commits of earlier groups: `checkpoint` is what this group starts from.

        Raises `OSError` or `LockLostError`.
        """
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        base = checkpoint.name if checkpoint else ""
        # a fence includes older ones with the same checkpoint
        older = [fence for fence in self.mine.fences if fence[1] != base]
        self._rewrite(fences=(*older, (self.mine.epoch, base))[-_FENCES:])
        self._records.prune()

    def release(self) -> None:
        """Release the folder for any other run. Does nothing if the lock was lost."""
        with suppress(LockLostError, OSError):
            self._rewrite(released=True)
        self.mine, self._tried = None, ""

    def last(self) -> LockRecord | None:
        """The newest complete record: a crash may leave a higher one empty. Raises `OSError`."""
        return self._records.read()[1]

    def find_valid(self) -> list[Checkpoint]:
        """The checkpoints that a training may resume from, newest first. Only this decides which
        one is the newest: other folders on the disk do not count, nor what LATEST says.
        Raises `OSError`.
        """
        return self.valid(CheckpointDirectory(self._root).committed())

    def find_newest(self) -> Checkpoint | None:
        """The newest of them, the one of the last group that has saved; whether it verifies is not
        checked. Raises `OSError`.
        """
        return next(iter(self.find_valid()), None)

    def choose(self, step: int | None) -> Checkpoint:
        """The newest checkpoint that a training may resume from, or that of `step`.

        Raises:
            CheckpointMismatchError: there is none.
            OSError: the disk failed.
        """
        valid = self.find_valid()
        chosen = next((one for one in valid if step is None or one.step == step), None)
        if chosen is not None:
            return chosen
        available = ", ".join(str(one.step) for one in valid[:10]) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise CheckpointMismatchError(
            f"there is no checkpoint{wanted} in {self._root}; available steps: {available}"
        )

    def valid(self, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints that were committed by a holder of the lock, in the given order. Raises
        `OSError`.
        """
        last = self.last()
        fences = (
            [(epoch, parse_name(base) or (-1, -1)) for epoch, base in last.fences]
            if last is not None
            else []
        )
        return [
            one
            for one in checkpoints
            if all(one.epoch >= epoch or one.order <= base for epoch, base in fences)
        ]

    def _create(self, record: LockRecord) -> None:
        try:
            self._records.create(record)
        except FileExistsError as error:
            raise LockLostError(
                f"epoch {record.epoch} of {self._root} was locked at the same time"
            ) from error
        self.mine = record

    def _rewrite(self, **changes: Any) -> None:
        self.check()
        assert self.mine is not None  # noqa: S101 - check() raised otherwise
        changed = replace(self.mine, **changes)
        try:
            self._records.rewrite(changed)
        except FileExistsError as error:
            raise LockLostError(f"epoch {self.mine.epoch} lost {self._root}") from error
        self.mine = changed

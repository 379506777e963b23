"""Where the lock of a checkpoint folder is recorded: in files of a folder, or in one object. Free
of torch.

On a file system each record is a file named by its epoch and created exclusively; the highest epoch
holds the lock. In an object store there is one object, which is only changed on the condition that
it still is what was read: of several that change it at once, one succeeds.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import Cause, Exit
from kdist_trainer.errors import CheckpointMismatchError, KdistTrainerError
from kdist_trainer.formats import NewerFormatError, stamp, take_format
from kdist_trainer.json_text import encode_json
from kdist_trainer.object_store.client import Tag
from kdist_trainer.object_store.errors import ObjectChangedError
from kdist_trainer.object_store.path import ObjectPath
from kdist_trainer.untrusted_text import parse_json

_RECORD = re.compile(r"e(\d{8,})\.json")
_KEEP = 3
_MOST_BYTES = 1 << 20


class LockLostError(KdistTrainerError):
    """A later worker group of the run has locked the folder; this one must end."""

    cause = Cause.NODE_LOST
    code = Exit.PEERS_LOST


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


class LockRecords(ABC):
    """The records of one folder's lock. Every method raises `OSError` if the storage fails."""

    @abstractmethod
    def read(self) -> tuple[int, LockRecord | None]:
        """The highest epoch that has been taken, 0 for none, and the newest complete record, which
        is of that epoch or of an earlier one.
        """

    @abstractmethod
    def create(self, record: LockRecord) -> None:
        """Take the record's epoch. Raises `FileExistsError` if another has taken it, or any later
        one, since the records were read.
        """

    @abstractmethod
    def rewrite(self, record: LockRecord) -> None:
        """Replace the record of the same epoch, which must be the last that was read. Raises
        `FileExistsError` if another has the lock meanwhile, as far as the storage can tell.
        """

    @abstractmethod
    def remove(self, epoch: int) -> None:
        """Give an epoch back, which is to be taken again."""

    @abstractmethod
    def prune(self) -> None:
        """Remove old records. Never raises `OSError`."""


def open_records(root: StoragePath) -> LockRecords:
    """The records of the lock of the checkpoint folder `root`."""
    if isinstance(root, ObjectPath):
        return LockObject(root / "lock.json")
    return LockFiles(root / "lock")


class LockFiles(LockRecords):
    """Records in a folder: a crash may leave the file of a higher epoch empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> tuple[int, LockRecord | None]:
        """The epoch of the last file, and the last one that can be read."""
        epochs = self._epochs()
        for epoch in reversed(epochs):
            with suppress(FileNotFoundError):
                record = LockRecord.from_bytes(self._path(epoch).read_bytes())
                if record is not None:
                    return epochs[-1], record
        return epochs[-1] if epochs else 0, None

    def create(self, record: LockRecord) -> None:
        """Create its file exclusively."""
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
        """Replace its file."""
        storage.replace(self._path(record.epoch), record.to_bytes())

    def remove(self, epoch: int) -> None:
        """Remove its file."""
        with suppress(FileNotFoundError):
            storage.remove(self._path(epoch))

    def prune(self) -> None:
        """Keep the newest few."""
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


class LockObject(LockRecords):
    """The newest record in one object."""

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

"""The layout of a checkpoint folder. Free of torch: agents and the command line read it too.

- `step-00001200-e3/`: a committed checkpoint, step 1200, written by the group of epoch 3
- `step-00001200-e3/files/`: in it, what a framework has written in its own format
- `step-00001300-e3.tmp-9f2c-4/`: one being written, or left by a writer that died
- `step-00001100-e2.damaged/`: one that did not verify, kept as evidence
- `LATEST`: name of the checkpoint that was committed last, for people; nothing is decided by it:
  `Lock.find_newest` says which is the newest
- `DONE`: the run has ended
- `lock/`, `ledger/`: who may write; what has happened

In an object store nothing can be renamed, so a checkpoint is there as soon as its manifest is, and
the manifest names the folder of the files:

- `step-00001200-e3/manifest.json`: a committed checkpoint
- `step-00001200-e3.files-9f2c-4/`: its files, or those of a save that was not committed
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.manifest import (
    FILES_PATTERN,
    NAME_PATTERN,
    DamagedCheckpointError,
    UnsupportedCheckpointError,
    name_of,
    parse_name,
    read_raw_manifest,
)
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.formats import NewerFormatError, stamp, take_format
from kdist_trainer.json_text import encode_json
from kdist_trainer.object_store.path import ObjectPath
from kdist_trainer.untrusted_text import MalformedTextError, parse_json

_TEMPORARY = re.compile(r"step-(\d{8,})-e(\d+)\.tmp-[\w-]+")
_DAMAGED = re.compile(r"step-(\d{8,})-e(\d+)\.damaged(-\d+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, with the optimizer step and the writer's epoch from its name."""

    step: int
    epoch: int
    path: StoragePath

    @property
    def name(self) -> str:
        return name_of(self.step, self.epoch)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts newer checkpoints last: by epoch first, because those of a later group replace all
        earlier ones.
        """
        return (self.epoch, self.step)


class CheckpointDirectory:
    """A checkpoint folder on the disk or in an object store. Reading never changes it; a missing
    folder is empty.
    """

    def __init__(self, root: StoragePath) -> None:
        self.root = root

    def new_folder(self, name: str, attempt: str) -> StoragePath:
        """A folder for the files of the checkpoint `name`, until it is committed.

        Args:
            name: of the checkpoint.
            attempt: of this attempt to save it; letters, digits, `_` and `-`.
        """
        kind = "files" if isinstance(self.root, ObjectPath) else "tmp"
        return self.root / f"{name}.{kind}-{attempt}"

    def committed(self) -> list[Checkpoint]:
        """Folders with a committed checkpoint's name, newest first; whether they verify is not
        checked.
        """
        return self._listed(NAME_PATTERN)

    def temporary(self) -> list[Checkpoint]:
        """Folders of saves in progress, or left by writers that died."""
        found = self._listed(_TEMPORARY)
        if isinstance(self.root, ObjectPath):
            used = self.used_folders()
            found += [one for one in self._listed(FILES_PATTERN) if one.path.name not in used]
        return found

    def used_folders(self) -> set[str]:
        """Names of the folders that manifests name; if one cannot be read, of all that it might."""
        used: set[str] = set()
        for one in [*self.committed(), *self.damaged()]:
            try:
                used.add(read_raw_manifest(one.path).folder)
            except (DamagedCheckpointError, UnsupportedCheckpointError):
                used |= {
                    other.path.name
                    for other in self._listed(FILES_PATTERN)
                    if other.name == one.name
                }
        return used

    def damaged(self) -> list[Checkpoint]:
        """Archived checkpoints that did not verify, newest first."""
        return self._listed(_DAMAGED)

    def loose_files(self) -> list[Path]:
        """Temporary files that a crash may leave: tokens of the storage probe and unfinished
        replacements.
        """
        if isinstance(self.root, ObjectPath):
            return []  # what replaces an object does so at once
        return [
            path
            for pattern in ("probe-*", "LATEST.tmp-*", "DONE.tmp-*")
            for path in self.root.glob(pattern)
            if path.is_file()
        ]

    def named(self) -> str | None:
        """The checkpoint's name in LATEST, which a crash may leave behind the newest one; None if
        there is none.
        """
        try:
            name = (self.root / "LATEST").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return name if parse_name(name) else None

    def write_latest(self, name: str) -> None:
        """Write a checkpoint's name to LATEST, atomically. Raises `OSError`."""
        storage.replace(self.root / "LATEST", f"{name}\n".encode("ascii"))

    def done(self) -> dict[str, Any] | None:
        """The document in DONE; None if the run has not ended, or nothing can be read. Raises
        `UnsupportedCheckpointError` if a newer version wrote it.
        """
        try:
            return self.read_done()
        except OSError:
            return None

    def read_done(self) -> dict[str, Any] | None:
        """The document in DONE; None if the run has not ended. Raises `OSError`, or
        `UnsupportedCheckpointError` if a newer version wrote it.
        """
        try:
            document = parse_json((self.root / "DONE").read_bytes(), allow_nan=True)
        except (FileNotFoundError, NotADirectoryError, MalformedTextError):
            return None
        try:
            document = take_format("DONE", document)
        except NewerFormatError as error:
            raise UnsupportedCheckpointError(f"{self.root}: {error}") from None
        return document if isinstance(document, dict) else None

    def write_done(self, document: dict[str, Any]) -> None:
        """Write DONE, atomically: the run has ended. Raises `OSError`."""
        storage.make_folder(self.root, durable=True)
        storage.replace(
            self.root / "DONE", encode_json(stamp("DONE", document), indent=2).encode() + b"\n"
        )

    def remove_done(self) -> None:
        """Remove DONE: the run has not ended. Raises `OSError`."""
        if (self.root / "DONE").exists():
            storage.remove(self.root / "DONE")

    def _listed(self, pattern: re.Pattern[str]) -> list[Checkpoint]:
        folders = storage.list_folders(self.root)
        matches = [(pattern.fullmatch(folder.name), folder) for folder in folders]
        found = [
            Checkpoint(int(match[1]), int(match[2]), folder) for match, folder in matches if match
        ]
        return sorted(found, key=lambda one: one.order, reverse=True)

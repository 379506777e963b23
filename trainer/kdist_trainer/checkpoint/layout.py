"""The layout of a checkpoint folder, and the manifest of each checkpoint. Free of torch: agents and
the command line read it too.

- `step-00001200-e3/`: a committed checkpoint, step 1200, written by the group of epoch 3
- `step-00001200-e3/files/`: in it, what a framework has written in its own format
- `step-00001300-e3.tmp-9f2c-4/`: one being written, or left by a writer that died
- `step-00001100-e2.damaged/`: one that did not verify, kept as evidence
- `LATEST`: name of the newest committed checkpoint; `DONE`: the run has ended
- `lock/`, `ledger/`: who may write; what has happened

`manifest.json` lists the files of a checkpoint with their sizes and digests. It is written last, so
a folder that has one was written to its end. It protects against damage, not against an attacker:
whoever can write the folder can write the manifest too, so files must be unpickled safely.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kdist_trainer
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.digest import Digest, UnknownAlgorithmError
from kdist_trainer.errors import CheckpointMismatchError

_NAME = re.compile(r"step-(\d{8,})-e(\d+)")
_TEMPORARY = re.compile(r"step-(\d{8,})-e(\d+)\.tmp-[\w-]+")
_DAMAGED = re.compile(r"step-(\d{8,})-e(\d+)\.damaged(-\d+)?")

MANIFEST = "manifest.json"
STATE = "state.json"
FILES = "files"
"""Subfolder of the files that a framework has written, in a checkpoint of its format."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, with the optimizer step and the writer's epoch from its name."""

    step: int
    epoch: int
    path: Path

    @property
    def name(self) -> str:
        return name_of(self.step, self.epoch)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts newer checkpoints last: by epoch first, because those of a later group replace all
        earlier ones.
        """
        return (self.epoch, self.step)


def name_of(step: int, epoch: int) -> str:
    """Name of a committed checkpoint's folder."""
    return f"step-{step:08d}-e{epoch}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Epoch and step of a committed checkpoint's name, in the order that sorts; None for any other
    name.
    """
    match = _NAME.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None


class CheckpointDirectory:
    """A checkpoint folder on the disk. Reading never changes it; a missing folder is empty."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def committed(self) -> list[Checkpoint]:
        """Folders with a committed checkpoint's name, newest first; whether they verify is not
        checked.
        """
        return self._listed(_NAME)

    def temporary(self) -> list[Checkpoint]:
        """Folders of saves in progress, or left by writers that died."""
        return self._listed(_TEMPORARY)

    def damaged(self) -> list[Checkpoint]:
        """Archived checkpoints that did not verify, newest first."""
        return self._listed(_DAMAGED)

    def loose_files(self) -> list[Path]:
        """Temporary files that a crash may leave: tokens of the storage probe and unfinished
        replacements.
        """
        return [
            path
            for pattern in ("probe-*", "LATEST.tmp-*", "DONE.tmp-*")
            for path in self.root.glob(pattern)
            if path.is_file()
        ]

    def latest(self) -> Path | None:
        """The checkpoint that LATEST names if it is there, else the newest committed one."""
        named = self.named()
        if named is not None and (self.root / named).is_dir():
            return self.root / named
        committed = self.committed()
        return committed[0].path if committed else None

    def named(self) -> str | None:
        """The checkpoint's name in LATEST; None if there is none."""
        try:
            name = (self.root / "LATEST").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return name if parse_name(name) else None

    def write_latest(self, name: str) -> None:
        """Write a checkpoint's name to LATEST, atomically. Raises `OSError`."""
        storage.replace(self.root / "LATEST", f"{name}\n".encode("ascii"))

    def done(self) -> dict[str, Any] | None:
        """The document in DONE; None if the run has not ended."""
        try:
            document = json.loads((self.root / "DONE").read_bytes())
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def write_done(self, document: dict[str, Any]) -> None:
        """Write DONE, atomically: the run has ended. Raises `OSError`."""
        storage.make_folder(self.root, durable=True)
        storage.replace(self.root / "DONE", json.dumps(document, indent=2).encode() + b"\n")

    def remove_done(self) -> None:
        """Remove DONE: the run has not ended. Raises `OSError`."""
        if (self.root / "DONE").exists():
            storage.remove(self.root / "DONE")

    def _listed(self, pattern: re.Pattern[str]) -> list[Checkpoint]:
        try:
            entries = list(self.root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
        matches = [(pattern.fullmatch(folder.name), folder) for folder in folders]
        found = [
            Checkpoint(int(match[1]), int(match[2]), folder) for match, folder in matches if match
        ]
        return sorted(found, key=lambda one: one.order, reverse=True)


FORMAT = 2
_READABLE = (1, FORMAT)
"""Formats of manifests that can be read: in format 1 all digests are SHA-256."""
_MAX_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20


class DamagedCheckpointError(Exception):
    """A checkpoint does not match its manifest; the message says how."""


class UnsupportedCheckpointError(CheckpointMismatchError):
    """A manifest is intact, and says that this version cannot read the checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its content. `samples_seen` is None for a script's
    checkpoint.
    """

    step: int
    epoch: int
    samples_seen: int | None
    world_size: int
    run_id: str
    parent: str | None
    config_digest: str
    versions: dict[str, str]
    files: dict[str, Digest] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return name_of(self.step, self.epoch)

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(digest.size for digest in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content, with its own digest, by which a flipped bit is noticed."""
        files = {name: digest.to_json() for name, digest in self.files.items()}
        body = {"format": FORMAT, **asdict(self), "files": files}
        return json.dumps({"manifest": body, "sha256": _digest_of(body)}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the content back. Raises `DamagedCheckpointError`, or `UnsupportedCheckpointError`
        if another version wrote something that this one does not know.
        """
        try:
            document = json.loads(data)
            body = document["manifest"]
            if document["sha256"] != _digest_of(body):
                raise DamagedCheckpointError(f"{MANIFEST} was changed after it was written")
            found = body.pop("format")
            if found not in _READABLE:
                raise _unsupported(f"is of format {found!r}")
            files = body.pop("files").items()
            return cls(**body, files={str(name): Digest.from_json(one) for name, one in files})
        except UnknownAlgorithmError as error:
            raise _unsupported(f"has digests of {str(error)!r}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{MANIFEST} is no manifest: {type(error).__name__}"
            ) from error


def _unsupported(what: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"{MANIFEST} {what}, which kdist-trainer {kdist_trainer.__version__} does not know: "
        "use the version that wrote it"
    )


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and compare it with the folder's name and with its files'
    names and sizes.

    Raises:
        DamagedCheckpointError: they differ, or there is no manifest.
        UnsupportedCheckpointError: another version wrote it.
        OSError: the disk failed.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise DamagedCheckpointError("is not a folder")
    manifest = Manifest.from_bytes(read_bounded(folder / MANIFEST, _MAX_BYTES))
    if parse_name(folder.name) != (manifest.epoch, manifest.step):
        raise DamagedCheckpointError(
            f"{MANIFEST} belongs to step {manifest.step} of epoch {manifest.epoch}"
        )
    for name, digest in manifest.files.items():
        parts = name.split("/")
        if name == MANIFEST or "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise DamagedCheckpointError(
                f"{MANIFEST} names {name!r}, which is no file of a checkpoint"
            )
        for end in range(1, len(parts)):
            if folder.joinpath(*parts[:end]).is_symlink():
                raise DamagedCheckpointError(f"{'/'.join(parts[:end])} is not a folder")
        size = _regular(folder / name).st_size
        if size != digest.size:
            raise DamagedCheckpointError(f"{name} has {size} bytes instead of {digest.size}")
    return manifest


def check_digests(folder: Path, files: Iterable[tuple[str, Digest]]) -> None:
    """Read files and compare their digests. Raises `DamagedCheckpointError` or `OSError`."""
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    for name, digest in files:
        found = digest.hasher()
        with os.fdopen(_open_regular(folder / name), "rb", buffering=0) as file:
            while count := file.readinto(chunk):
                found.update(chunk[:count])
        if found.hexdigest() != digest.value:
            raise DamagedCheckpointError(f"{name} was changed after it was written")


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Read a small file and verify its digest.

    Args:
        folder: the checkpoint's folder.
        name: the file's name.
        manifest: has the digest.

    Raises:
        DamagedCheckpointError: it is missing, too large, or was changed.
        OSError: the disk failed.
    """
    if name not in manifest.files:
        raise DamagedCheckpointError(f"{name} is not in {MANIFEST}")
    data = read_bounded(folder / name, _MAX_BYTES)
    if not manifest.files[name].matches(data):
        raise DamagedCheckpointError(f"{name} was changed after it was written")
    return data


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`. Raises `DamagedCheckpointError` or `OSError`."""
    if _regular(path).st_size > max_bytes:
        raise DamagedCheckpointError(f"{path.name} is larger than {max_bytes} bytes")
    with os.fdopen(_open_regular(path), "rb") as file:
        return file.read(max_bytes + 1)


def _regular(path: Path) -> os.stat_result:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path.name} is missing") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpointError(f"{path.name} is not a regular file")
    return found


def _open_regular(path: Path) -> int:
    _regular(path)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

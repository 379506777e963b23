"""`manifest.json`: what a checkpoint consists of, and the check that it is all there and unchanged. Free of torch.

The manifest is written last, so a folder that has one was written to its end. It guards against damage, not against an
attacker: whoever can write the folder can write the manifest too, and what unpickles a file must be safe by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint.files import Digest
from kdist_trainer.checkpoint.layout import MANIFEST, name_of, parse_name

FORMAT = 1
_MOST_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20


class Damaged(Exception):  # noqa: N818 - a state of the disk that is expected and handled, not an error of the program
    """A checkpoint is not what its manifest says; the message says what is wrong."""


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its content; sizes in bytes, digests SHA-256 in hexadecimal."""

    step: int
    epoch: int
    samples_seen: int
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
        """The file's content. It carries its own digest: a flipped bit here would otherwise pass for another position."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({"manifest": body, "sha256": _digest_of(body)}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the content back. Raises `Damaged`."""
        try:
            document = json.loads(data)
            body = document["manifest"]
            if document["sha256"] != _digest_of(body):
                raise Damaged(f"{MANIFEST} was changed after it was written")
            if body.pop("format") != FORMAT:
                raise Damaged(f"{MANIFEST} is of a format that this version does not know")
            files = {str(name): Digest(**digest) for name, digest in body.pop("files").items()}
            return cls(**body, files=files)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} is no manifest: {type(error).__name__}") from error


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a committed folder and check it against the folder's name and its files' names and sizes.

    Raises `Damaged` when something is wrong with the checkpoint, `OSError` when the disk did not answer.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise Damaged("is not a folder")
    manifest = Manifest.from_bytes(read_bounded(folder / MANIFEST, _MOST_BYTES))
    if parse_name(folder.name) != (manifest.epoch, manifest.step):
        raise Damaged(f"{MANIFEST} belongs to step {manifest.step} of epoch {manifest.epoch}")
    for name, digest in manifest.files.items():
        if name in ("", ".", "..", MANIFEST) or "/" in name or "\0" in name:
            raise Damaged(f"{MANIFEST} names {name!r}, which is no file of a checkpoint")
        size = _regular(folder / name).st_size
        if size != digest.size:
            raise Damaged(f"{name} has {size} bytes instead of {digest.size}")
    return manifest


def check_digests(folder: Path, files: Iterable[tuple[str, Digest]]) -> None:
    """Read these files whole and compare their digests. Raises `Damaged`, or `OSError` when the disk did not answer."""
    for name, digest in files:
        found = hashlib.sha256()
        with os.fdopen(_open_regular(folder / name), "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
        if found.hexdigest() != digest.sha256:
            raise Damaged(f"{name} was changed after it was written")


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """The content of a small file, compared with its digest before anyone parses it. Raises `Damaged` or `OSError`."""
    if name not in manifest.files:
        raise Damaged(f"{name} is not in {MANIFEST}")
    data = read_bounded(folder / name, _MOST_BYTES)
    if hashlib.sha256(data).hexdigest() != manifest.files[name].sha256:
        raise Damaged(f"{name} was changed after it was written")
    return data


def read_bounded(path: Path, most: int) -> bytes:
    """A regular file's content if it is at most `most` bytes. Raises `Damaged` or `OSError`."""
    if _regular(path).st_size > most:
        raise Damaged(f"{path.name} is larger than {most} bytes")
    with os.fdopen(_open_regular(path), "rb") as file:
        return file.read(most + 1)


def _regular(path: Path) -> os.stat_result:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{path.name} is missing") from error
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path.name} is not a regular file")
    return found


def _open_regular(path: Path) -> int:
    _regular(path)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

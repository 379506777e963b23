"""The layout of a checkpoint folder, and its documents: the manifest, `state.json` and DONE, with
the verification of a checkpoint's files. Free of torch: agents and the command line read them too.

- `step-00001200-e3/`: a committed checkpoint, step 1200, written by the group of epoch 3
- `step-00001200-e3/files/`: in it, what a framework has written in its own format
- `step-00001300-e3.tmp-9f2c-4/`: one being written, or left by a writer that died
- `step-00001100-e2.damaged/`: one that did not verify, kept as evidence
- `LATEST`: name of the checkpoint that was committed last, for people; nothing is decided by it:
  `Lock.find_newest` says which is the newest
- `DONE`: the run has ended
- `lock/`, `ledger/`: who may write; what has happened
- `logs/node-0/g00003-0001.log`: written by an agent, the first segment of what node 0 has written
  in generation 3; the segments of a node are bounded together, so the oldest may be missing

In an object store nothing can be renamed, so a checkpoint is there as soon as its manifest is, and
the manifest names the folder of the files:

- `step-00001200-e3/manifest.json`: a committed checkpoint
- `step-00001200-e3.files-9f2c-4/`: its files, or those of a save that was not committed

The manifest lists the files of a checkpoint with their sizes and digests. It is written last, so a
folder that has one was written to its end. It protects against damage, not against an attacker:
whoever can write the folder can write the manifest too, so files must be unpickled safely.

`state.json` is plain JSON in which types survive: a tuple is written as `{"$tuple": [...]}`, a dict
with keys other than strings as `{"$items": [[key, value], ...]}`, and a number that is not finite,
which JSON does not have, as `{"$float": "nan"}`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import kdist_trainer
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import CHECKPOINT as PREFIX
from kdist_trainer.formats import FIRST, FORMATS, NewerFormatError, check_format, stamp, take_format
from kdist_trainer.formats import FORMAT as FORMAT_FIELD
from kdist_trainer.formats import checkpoint_name as name_of
from kdist_trainer.formats.digest import Digest, UnknownAlgorithmError
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_json
from kdist_trainer.object_store.store import ObjectPath

_TUPLE: Final = "$tuple"
_ITEMS: Final = "$items"
_FLOAT: Final = "$float"
NOT_REGULAR: Final = "is not a regular file"
_MOST_DEPTH: Final = 40  # two levels of JSON each


class UnloadableStateError(CheckpointMismatchError):
    """The state of the training holds what a checkpoint could not give back; the message names it,
    and what to do.
    """


def too_deep(path: str, levels: int) -> UnloadableStateError:
    """The error of a value that a checkpoint cannot hold because of what is in it."""
    return UnloadableStateError(
        f"{path[:200]} is nested deeper than {levels} levels, or holds itself: a checkpoint "
        "cannot hold it"
    )


def encode(value: Any, path: str) -> tuple[Any, bool]:
    """A value, of numbers, texts, and dicts, lists and tuples of these, as JSON, and whether it
    holds what plain JSON does not. Raises `UnloadableStateError`, which names the `path` that leads
    to it, if it holds something else.
    """
    encoded = _encode(value, path, 0)
    return encoded, decode(encoded) != encoded


def _encode(value: Any, path: str, depth: int) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > _MOST_DEPTH:
        raise too_deep(path, _MOST_DEPTH)
    if type(value) in (list, tuple):
        each = [_encode(one, f"{path}[{at}]", depth + 1) for at, one in enumerate(value)]
        return {_TUPLE: each} if type(value) is tuple else each
    if not isinstance(value, Mapping):
        return _plain(value, path)
    pairs = [(key, _encode(one, f"{path}[{key!r:.80}]", depth + 1)) for key, one in value.items()]
    texts = {str(key): one for key, one in pairs if isinstance(key, str)}
    if len(texts) == len(pairs) and not (texts.keys() & {_TUPLE, _ITEMS, _FLOAT}):
        return texts
    return {
        _ITEMS: [
            [_encode(key, f"the key {key!r:.80} of {path}", depth + 1), one] for key, one in pairs
        ]
    }


def _plain(value: Any, path: str) -> Any:
    """A number or text of Python's own types."""
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is True or value is False:
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UnloadableStateError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved there: give "
        "numbers, texts, and dicts, lists and tuples of these"
    )


def decode(value: Any) -> Any:
    """The value that was given to `encode`. Raises `ValueError`, `TypeError` or `RecursionError` if
    it is none.
    """
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decode(one) for one in value[_TUPLE])
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    if value.keys() == {_ITEMS}:
        return {decode(key): decode(one) for key, one in value[_ITEMS]}
    return {key: decode(one) for key, one in value.items()}


_STEM = PREFIX + r"(\d{8,})-e(\d+)"
NAME_PATTERN = re.compile(_STEM)
FILES_PATTERN = re.compile(_STEM + r"\.files-[\w-]+")
MANIFEST = "manifest.json"
STATE = "state.json"
FILES = "files"
"""Subfolder of the files that a framework has written, in a checkpoint of its format."""


def parse_name(name: str) -> tuple[int, int] | None:
    """Epoch and step of a committed checkpoint's name, in the order that sorts; None for any other
    name.
    """
    match = NAME_PATTERN.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None


FORMAT = FORMATS["manifest.json"]
"""In format 1 all digests are SHA-256."""
_READABLE = range(1, FORMAT + 1)
MAX_BYTES = 1 << 30


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
    folder: str = ""
    """Name of the folder of the files, next to the manifest's; empty if it is the same."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return name_of(self.step, self.epoch)

    def locate(self, folder: StoragePath) -> StoragePath:
        """The folder of the files of the checkpoint `folder`. Raises `DamagedCheckpointError`."""
        if not self.folder:
            return folder
        if not FILES_PATTERN.fullmatch(self.folder):
            raise DamagedCheckpointError(f"{MANIFEST} names {self.folder!r}, which is no folder")
        return folder.with_name(self.folder)

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(digest.size for digest in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content, with its own digest, by which a flipped bit is noticed."""
        files = {name: digest.to_json() for name, digest in self.files.items()}
        body = {"format": FORMAT, **asdict(self), "files": files}
        if not self.folder:  # unknown to earlier versions, and nowhere needed but in object stores
            del body["folder"]
        return (
            encode_json({"manifest": body, "sha256": _digest_of(body)}, indent=1).encode() + b"\n"
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read the content back. Raises `DamagedCheckpointError`, or `UnsupportedCheckpointError`
        if another version wrote something that this one does not know.
        """
        try:
            document = parse_json(data, max_bytes=MAX_BYTES, keep_surrogates=True)
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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{MANIFEST} is no manifest: {type(error).__name__}"
            ) from error


def write_state(state: Mapping[str, Any], job: Mapping[str, Any]) -> bytes:
    """The content of `state.json`. Raises `UnloadableStateError` if JSON cannot hold the state."""
    encoded, is_extended = encode(state, "state")
    document = stamp(STATE, {"state": encoded, "job": job})
    if not is_extended:
        document[FORMAT_FIELD] = FIRST  # so that earlier versions read it
    return encode_json(document, indent=1).encode() + b"\n"


def read_state_json(data: bytes) -> tuple[Any, Any]:
    """The state and the job of a `state.json`.

    Raises:
        NewerFormatError: a newer version wrote it.
        ValueError, KeyError, TypeError: it is no such document.
    """
    document = parse_json(data, max_bytes=MAX_BYTES, allow_nan=True, keep_surrogates=True)
    check_format(STATE, document)
    state = document["state"]
    is_extended = document.get(FORMAT_FIELD, FIRST) != FIRST
    return decode(state) if is_extended else state, document.get("job", {})


def _unsupported(what: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"{MANIFEST} {what}, which kdist-trainer {kdist_trainer.__version__} does not know: "
        "use the version that wrote it"
    )


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(
        encode_json(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read_manifest(folder: StoragePath) -> Manifest:
    """Read the manifest of a checkpoint and compare it with the folder's name and with its files'
    names and sizes.

    Raises:
        DamagedCheckpointError: they differ, or there is no manifest.
        UnsupportedCheckpointError: another version wrote it.
        OSError: the disk failed.
    """
    if isinstance(folder, Path) and (folder.is_symlink() or not folder.is_dir()):
        raise DamagedCheckpointError("is not a folder")
    manifest = read_raw_manifest(folder)
    if parse_name(folder.name) != (manifest.epoch, manifest.step):
        raise DamagedCheckpointError(
            f"{MANIFEST} belongs to step {manifest.step} of epoch {manifest.epoch}"
        )
    for name in manifest.files:
        if name == MANIFEST or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise DamagedCheckpointError(
                f"{MANIFEST} names {name!r}, which is no file of a checkpoint"
            )
    check_sizes(manifest.locate(folder), manifest.files)
    return manifest


def check_sizes(folder: StoragePath, files: Mapping[str, Digest]) -> None:
    """Compare the files in a folder with the digests of a manifest by their sizes.

    Raises:
        DamagedCheckpointError: one is missing, no regular file, or of another size.
        OSError: the disk failed.
    """
    sizes = _find_sizes(folder, files)
    for name, digest in files.items():
        if sizes[name] != digest.size:
            raise DamagedCheckpointError(f"{name} has {sizes[name]} bytes instead of {digest.size}")


def read_raw_manifest(folder: StoragePath) -> Manifest:
    """Read the manifest of a checkpoint and compare it with nothing else. Raises as
    `read_manifest` does.
    """
    return Manifest.from_bytes(read_bounded(folder / MANIFEST, MAX_BYTES))


def _find_sizes(folder: StoragePath, names: Iterable[str]) -> Mapping[str, int]:
    """Sizes of the files in bytes. Raises `DamagedCheckpointError` if one is missing or no regular
    file, or `OSError`.
    """
    if isinstance(folder, ObjectPath):
        sizes = folder.files()
        missing = next((name for name in names if name not in sizes), None)
        if missing is not None:
            raise DamagedCheckpointError(f"{missing} is missing")
        return sizes
    for name in names:
        parts = name.split("/")
        for end in range(1, len(parts)):
            if folder.joinpath(*parts[:end]).is_symlink():
                raise DamagedCheckpointError(f"{'/'.join(parts[:end])} is not a folder")
    return {name: _regular(folder / name).st_size for name in names}


def check_digests(folder: StoragePath, manifest: Manifest, names: Iterable[str]) -> None:
    """Read files of a checkpoint and compare their digests with those of its manifest.

    Raises:
        DamagedCheckpointError: one was changed.
        OSError: the disk failed.
    """
    files = manifest.locate(folder)
    for name in names:
        path, found = files / name, manifest.files[name].hasher()
        if isinstance(path, Path):
            _regular(path)
        try:
            for chunk in storage.read_pieces(path):
                found.update(chunk)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path.name} is missing") from error
        if found.hexdigest() != manifest.files[name].value:
            raise DamagedCheckpointError(f"{name} was changed after it was written")


def read_checked(folder: StoragePath, name: str, manifest: Manifest) -> bytes:
    """Read a small file of a checkpoint and verify its digest.

    Raises:
        DamagedCheckpointError: it is missing, too large, or was changed.
        OSError: the disk failed.
    """
    if name not in manifest.files:
        raise DamagedCheckpointError(f"{name} is not in {MANIFEST}")
    data = read_bounded(manifest.locate(folder) / name, MAX_BYTES)
    if not manifest.files[name].matches(data):
        raise DamagedCheckpointError(f"{name} was changed after it was written")
    return data


def read_bounded(path: StoragePath, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`. Raises `DamagedCheckpointError` or `OSError`."""
    if isinstance(path, ObjectPath):
        try:
            return path.read_bytes(max_bytes)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path.name} is missing") from error
    if _regular(path).st_size > max_bytes:
        raise DamagedCheckpointError(f"{path.name} is larger than {max_bytes} bytes")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(max_bytes + 1)


def _regular(path: Path) -> os.stat_result:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path.name} is missing") from error
    if not stat.S_ISREG(found.st_mode):
        raise DamagedCheckpointError(f"{path.name} {NOT_REGULAR}")
    return found


_TEMPORARY = re.compile(_STEM + r"\.tmp-[\w-]+")
_DAMAGED = re.compile(_STEM + r"\.damaged(-\d+)?")


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
        """A folder for the files of the checkpoint `name`, until it is committed. `attempt` names
        this attempt to save it, by letters, digits, `_` and `-`.
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
            for pattern in (
                "probe-*",
                "LATEST.tmp-*",
                "DONE.tmp-*",
                f"{COMPILED}/*.tmp-*",
                f"{MEMORY}/*.tmp-*",
            )
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


LOGS, COMPILED, MEMORY = "logs", "compiled", "memory"
"""Folders next to the checkpoints."""
_NAME = re.compile(r"g(\d{5,})-(\d{4,})\.log")


class LogSegment(NamedTuple):
    """A part of a node's log, by the generation that it is of and its number, from 1."""

    generation: int
    number: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"g{self.generation:05d}-{self.number:04d}.log"


def list_segments(folder: StoragePath) -> dict[LogSegment, int]:
    """The segments of one node, oldest first, with their sizes in bytes; none if there is no
    folder. Raises `OSError`.
    """
    found = {}
    for name, size in storage.list_files(folder).items():
        if match := _NAME.fullmatch(name):
            found[LogSegment(int(match[1]), int(match[2]))] = size
    return dict(sorted(found.items()))

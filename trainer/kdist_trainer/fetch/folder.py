"""The folder that a fetch fills: `files` for whole files, `partial` for others, and `fetch.json`,
which says what both are versions of.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from kdist_trainer.errors import DataError
from kdist_trainer.fetch.request import FetchRequest
from kdist_trainer.fetch.source import RemoteFile
from kdist_trainer.json_text import encode_json
from kdist_trainer.untrusted_text import parse_json

STATE: Final = "fetch.json"
FILES: Final = "files"
PARTIAL: Final = "partial"
LOCK: Final = "lock"
_VERSION: Final = 1
_LONGEST_PART: Final = 255  # bytes of a name on the usual file systems


@dataclass
class KnownFile:
    """What `fetch.json` says of a file: its version, and once it is complete its size and, if it
    was compared, its digest.
    """

    tag: str
    size: int | None
    sha256: str = ""


class FetchFolder:
    """The folder of one fetch. Every method raises `OSError`."""

    def __init__(self, request: FetchRequest) -> None:
        """Read what an earlier fetch has left; nothing is written yet."""
        self.files = request.folder / FILES
        self._field = request.field
        self._folder = request.folder
        self._source = {
            "version": _VERSION,
            "url": request.url,
            "endpoint": request.endpoint,
            "region": request.region,
        }
        self._known: dict[str, KnownFile] = {}
        self._lock = threading.Lock()

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Keep other fetches out; calls `waiting` once if there is one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # a link would have another file created, or emptied; a pipe would be waited for
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(self._folder / LOCK, flags, 0o666), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def adopt(self, files: Sequence[RemoteFile]) -> None:
        """Keep what belongs to these files, remove all else, and record their versions. Raises
        `DataError` for names that cannot be files together.
        """
        self._check_names(files)
        known = self._known or self._read()
        kept: dict[str, KnownFile] = {}
        for file in files:
            entry = known.get(file.name)
            is_same = entry is not None and bool(file.tag) and entry.tag == file.tag
            if entry is not None and is_same and file.size in (None, entry.size):
                kept[file.name] = entry
            else:
                kept[file.name] = KnownFile(file.tag, file.size)
                # before `fetch.json` names the new version
                self.discard(file.name)
        self._remove_others(kept)
        self._known = kept
        for folder in (self.files, self._folder / PARTIAL):
            folder.mkdir(exist_ok=True)
        self.save()

    def is_complete(self, file: RemoteFile) -> bool:
        """Whether the file is there, of its listed version."""
        size = self._known[file.name].size
        try:
            return (self.files / file.name).stat().st_size == size
        except OSError:
            return False

    def partial(self, file: RemoteFile) -> Path:
        """The path of what has come of the file so far."""
        return self._partial(file.name)

    def partial_bytes(self, file: RemoteFile) -> int:
        """The size of what has come so far and can be continued, in bytes."""
        if not file.tag:
            return 0
        try:
            size = self.partial(file).stat().st_size
        except OSError:
            return 0
        return size if file.size is None or size <= file.size else 0

    def digest(self, file: RemoteFile) -> str:
        """The digest of a complete file that was computed before; empty if none was."""
        return self._known[file.name].sha256

    def finish(self, file: RemoteFile, digest: str) -> None:
        """Move a file that has come whole to where the job reads it."""
        partial, path = self.partial(file), self.files / file.name
        size = partial.stat().st_size
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._known[file.name] = KnownFile(file.tag, size, digest)
            if file.size is None:
                # its size is not in the record yet
                self._write()
        partial.replace(path)

    def record_digest(self, file: RemoteFile, digest: str) -> None:
        """Remember that a complete file was compared."""
        self._known[file.name].sha256 = digest

    def discard(self, name: str) -> None:
        """Remove a file, whole or partial."""
        with suppress(OSError):
            (self.files / name).unlink()
        with suppress(FileNotFoundError):
            self._partial(name).unlink()

    def save(self) -> None:
        """Write `fetch.json`."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Save, and remove the folder of partial files once there are none."""
        self.save()
        shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)

    def _partial(self, name: str) -> Path:
        return self._folder / PARTIAL / sha256(name.encode()).hexdigest()[:32]

    def _read(self) -> dict[str, KnownFile]:
        try:
            document: dict[str, Any] = parse_json((self._folder / STATE).read_bytes())
            if {key: document.get(key) for key in self._source} != self._source:
                return {}
            return {
                name: KnownFile(str(one["tag"]), one["size"], str(one["sha256"]))
                for name, one in document["files"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self) -> None:
        document = self._source | {
            "files": {name: asdict(one) for name, one in self._known.items()}
        }
        fresh = self._folder / f"{STATE}.new"
        fresh.write_text(encode_json(document))
        fresh.replace(self._folder / STATE)

    def _remove_others(self, kept: dict[str, KnownFile]) -> None:
        partial = {self._partial(name).name for name in kept}
        for path in self._folder.glob(f"{PARTIAL}/*"):
            if path.name not in partial:
                path.unlink()
        for parent, folders, names in os.walk(self.files, topdown=False):
            for name in names:
                path = Path(parent) / name
                if str(path.relative_to(self.files)) not in kept:
                    path.unlink()
            for name in folders:
                with suppress(OSError):  # not empty
                    (Path(parent) / name).rmdir()

    def _check_names(self, files: Sequence[RemoteFile]) -> None:
        names = {file.name for file in files}
        for name in names:
            parts = name.split("/")
            if (
                any(part in {"", ".", ".."} for part in parts)
                or "\0" in name
                or any(len(part.encode(errors="replace")) > _LONGEST_PART for part in parts)
                or not _is_text(name)
            ):
                raise DataError(f"{self._field}: {name!r} cannot be the name of a file: rename it")
            for depth in range(1, len(parts)):
                folder = "/".join(parts[:depth])
                if folder in names:
                    raise DataError(
                        f"{self._field}: {folder!r} is a file, and {name!r} is below it, which no "
                        "folder can have: rename one of them"
                    )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_full(error: OSError) -> bool:
    """Whether there is no space left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

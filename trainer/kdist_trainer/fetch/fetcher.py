"""One fetch from start to end: checks that the files fit into what the job allows and the disk has;
downloads each one, continuing partial files, repeating failed requests and comparing digests, also
those of SHA256SUMS; and reports progress.

The folder of a fetch has `files` for complete files, `partial` for others, and `fetch.json`, which
names their versions.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

from kdist_trainer import log
from kdist_trainer.errors import DataError, StorageError
from kdist_trainer.fetch import (
    ChangedError,
    FetchRequest,
    RemoteFile,
    TransientError,
)
from kdist_trainer.fetch.bucket import BucketSource
from kdist_trainer.fetch.web import INDEX, LARGEST_INDEX, HubSource, WebSource, shards_of
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json

SUMS: Final = "SHA256SUMS"
LARGEST_SUMS: Final = 256 << 20
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPES: Final = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


def is_sums(name: str) -> bool:
    """Whether a file has digests."""
    return name.rpartition("/")[2] == SUMS


def parse_sums(text: bytes, where: str) -> dict[str, str]:
    """The digests in lower case, by the names as they are written. Raises `DataError`, which names
    the file by `where`, for a line that is not as `sha256sum` writes it.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.decode(errors="surrogateescape").split("\n"), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None:
            raise DataError(
                f"{where}: line {number} is not a digest, two spaces and a name, as sha256sum "
                "writes it"
            )
        name = match[3]
        if match[1]:
            name = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], name)
        found[name] = match[2].lower()
    return found


REPORT_SECONDS: Final = 2.0

T = TypeVar("T")


class FetchProgress:
    """Counts bytes and files. Safe to use from several threads.

    Only a position that was never reached before is progress: a file that ends at the same byte
    again and again is none.
    """

    def __init__(self, request: FetchRequest) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._positions: dict[str, int] = {}
        self._highest: dict[str, int] = {}
        self.done_bytes = 0
        self._files_done = 0
        self._files = 0
        self._total: int | None = None
        self.advances = 0
        """Grows whenever there is progress."""
        self._reported: tuple[float, int] | None = None

    def begin(self, *, files: int, total: int | None) -> None:
        with self._lock:
            self._positions.clear()
            self.done_bytes = self._files_done = 0
            self._files, self._total = files, total
            self._reported = None

    def set_position(self, name: str, position: int) -> None:
        with self._lock:
            self.done_bytes += position - self._positions.get(name, 0)
            self._positions[name] = position
            if position > self._highest.get(name, -1):
                self._highest[name] = position
                self.advances += 1

    def finish_file(self) -> None:
        with self._lock:
            self._files_done += 1

    def report(self) -> None:
        """Log the progress, unless that was done less than `REPORT_SECONDS` ago."""
        with self._lock:
            now, done = time.monotonic(), self.done_bytes
            before = self._reported or (now, done)
            if self._reported is not None and now - before[0] < REPORT_SECONDS:
                return
            is_first, self._reported = self._reported is None, (now, done)
            fields: dict[str, Any] = {
                "url": self._request.url,
                "field": self._request.field,
                "done_bytes": done,
                "total_bytes": self._total,
                "files_done": self._files_done,
                "files": self._files,
            }
        if not is_first:
            speed = max(0, round((done - before[1]) / (now - before[0])))
            log.event("data-progress", **fields, bytes_per_second=speed)


class FetchStopped(Exception):  # noqa: N818 - no error
    """Another file has failed for good: this one is abandoned."""


FIRST_WAIT_SECONDS: Final = 0.25
LONGEST_WAIT_SECONDS: Final = 30.0


class Retries:
    """The failures of one call. They begin again whenever the fetch has made progress."""

    def __init__(
        self, request: FetchRequest, progress: FetchProgress, stopped: threading.Event
    ) -> None:
        self._request = request
        self._progress = progress
        self._stopped = stopped
        self._advances = -1
        self._attempt = 0
        self._since = 0.0

    def wait(self, description: str, error: TransientError) -> None:
        """Wait before the request that has failed is repeated.

        Raises:
            StorageError: there was no progress for too long.
            FetchStopped: the fetch has failed otherwise.
        """
        request, advances = self._request, self._progress.advances
        if advances != self._advances:
            self._advances, self._attempt, self._since = advances, 0, time.monotonic()
        self._attempt += 1
        stalled, allowed = time.monotonic() - self._since, request.stall_seconds
        if stalled >= allowed:
            raise StorageError(
                f"{request.field}: {description} cannot be fetched: {error}; nothing has come for "
                f"{stalled:.0f} s: start it again when the server works, what has come is kept"
            )
        longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(self._attempt - 1, 20))
        random_wait = longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load
        seconds = min(max(error.wait_seconds, random_wait), allowed - stalled + 0.01)
        log.warn(
            "data-retry",
            url=request.url,
            field=request.field,
            file=description,
            reason=str(error),
            seconds=round(seconds, 3),
        )
        if self._stopped.wait(seconds):
            raise FetchStopped


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

    def partial(self, name: str) -> Path:
        """The path of what has come of the file so far."""
        return self._folder / PARTIAL / sha256(name.encode()).hexdigest()[:32]

    def partial_bytes(self, file: RemoteFile) -> int:
        """The size of what has come so far and can be continued, in bytes."""
        if not file.tag:
            return 0
        try:
            size = self.partial(file.name).stat().st_size
        except OSError:
            return 0
        return size if file.size is None or size <= file.size else 0

    def check(self, file: RemoteFile, digest: str) -> str | None:
        """The digest of the complete file, empty if none is expected; None if it is not there. A
        file is read only once for that.
        """
        if not self.is_complete(file):
            return None
        known = self._known[file.name]
        if not digest or known.sha256 == digest:
            return digest
        with (self.files / file.name).open("rb") as content:
            known.sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        return known.sha256

    def finish(self, file: RemoteFile, digest: str) -> None:
        """Move a file that has come whole to where the job reads it."""
        partial, path = self.partial(file.name), self.files / file.name
        size = partial.stat().st_size
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._known[file.name] = KnownFile(file.tag, size, digest)
            if file.size is None:
                # its size is not in the record yet
                self._write()
        partial.replace(path)

    def discard(self, name: str) -> None:
        """Remove a file, whole or partial."""
        with suppress(OSError):
            (self.files / name).unlink()
        with suppress(FileNotFoundError):
            self.partial(name).unlink()

    def save(self) -> None:
        with self._lock:
            self._write()

    def close(self) -> None:
        """Save, and remove the folder of partial files once there are none."""
        self.save()
        shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)

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
        partial = {self.partial(name).name for name in kept}
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
                or name.encode(errors="replace").decode() != name
            ):
                raise DataError(f"{self._field}: {name!r} cannot be the name of a file: rename it")
            for depth in range(1, len(parts)):
                folder = "/".join(parts[:depth])
                if folder in names:
                    raise DataError(
                        f"{self._field}: {folder!r} is a file, and {name!r} is below it, which no "
                        "folder can have: rename one of them"
                    )


def is_full(error: OSError) -> bool:
    """Whether there is no space left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_UNITS = ("Ki", "Mi", "Gi", "Ti")


def check_space(request: FetchRequest, folder: FetchFolder, files: Sequence[RemoteFile]) -> None:
    """Raise `DataError` if the files are larger than the job allows, or than the disk's space;
    those of unknown size count as empty.
    """
    total = sum(file.size or 0 for file in files)
    if request.max_bytes is not None and total > request.max_bytes:
        raise too_large_error(request, total)
    missing = sum(
        max(0, (file.size or 0) - folder.partial_bytes(file))
        for file in files
        if not folder.is_complete(file)
    )
    free = free_bytes(request)
    if missing > free:
        raise DataError(
            f"{request.field}: {format_bytes(missing)} of {request.url} are to be fetched, but "
            f"{request.folder} has {format_bytes(free)} free: make room there, or raise "
            f"{request.field}.size so that the pods are placed on nodes with more space"
        )


def too_large_error(
    request: FetchRequest, total: int | None = None, *, at_least: int = 0
) -> DataError:
    """The error of files that are larger than the job allows."""
    amount = format_bytes(total) if total is not None else f"at least {format_bytes(at_least)}"
    return DataError(
        f"{request.field}: {request.url} has {amount}, more than the "
        f"{format_bytes(request.max_bytes or 0)} of {request.field}.size: raise "
        f"{request.field}.size"
    )


def free_bytes(request: FetchRequest) -> int:
    """The free space of the disk, in bytes."""
    found = os.statvfs(request.folder)
    return found.f_bavail * found.f_frsize


def format_bytes(number: int) -> str:
    """A number of bytes for people, exact and rounded."""
    amount, unit = float(number), ""
    for larger in _UNITS:
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{number} bytes" if not unit else f"{number} bytes ({amount:.1f} {unit}B)"


_READ_BYTES: Final = 1 << 20


def _hash_start(file: io.FileIO, length: int, digest: hashlib._Hash) -> None:
    left = length
    while left > 0 and (chunk := file.read(min(left, _READ_BYTES))):
        digest.update(chunk)
        left -= len(chunk)


def _write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


_TICK_SECONDS: Final = 0.5
_SAVE_SECONDS: Final = 10.0


class Fetcher:
    """One fetch."""

    def __init__(self, request: FetchRequest) -> None:
        """Prepare, without a request. Raises `ConfigError`, or `ImportError`."""
        request.check()
        self._request = request
        self._source: HubSource | WebSource | BucketSource
        if request.scheme == "hf":
            self._source = HubSource(request)
        elif request.scheme in ("http", "https"):
            self._source = WebSource(request)
        else:
            self._source = BucketSource(request)
        self._folder = FetchFolder(request)
        self._progress = FetchProgress(request)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Fetch what is missing, and log the progress. After an error, threads may still wait for a
        server.

        Raises:
            ConfigError: the job must be corrected.
            DataError: what is there is not what the job asks for.
            StorageError: the server failed for too long.
            OSError: this machine's disk failed.
        """
        begun = time.monotonic()
        with self._folder.locked(self._log_waiting):
            retries = Retries(self._request, self._progress, self._stopped)
            while True:
                try:
                    files = self._fetch_listed()
                    break
                except ChangedError as error:
                    changed = TransientError(f"it has changed while it was fetched ({error})")
                    retries.wait(self._request.url, changed)
            self._folder.close()
        log.event(
            "data-ready",
            url=self._request.url,
            field=self._request.field,
            folder=str(self._folder.files),
            files=len(files),
            bytes=self._progress.done_bytes,
            seconds=round(time.monotonic() - begun, 3),
        )

    def _log_waiting(self) -> None:
        log.event(
            "data-waiting",
            url=self._request.url,
            field=self._request.field,
            message=f"another process fetches into {self._request.folder}: waiting for it",
        )

    def _fetch_listed(self) -> Sequence[RemoteFile]:
        """List the files, and fetch those that are not there. Raises `ChangedError` too."""
        files = self._retry(self._request.url, self._list_files)
        folder, progress = self._folder, self._progress
        folder.adopt(files)
        check_space(self._request, folder, files)
        is_counted = all(file.size is not None for file in files)
        total = sum(file.size or 0 for file in files) if is_counted else None
        progress.begin(files=len(files), total=total)
        log.event(
            "data-fetch",
            url=self._request.url,
            field=self._request.field,
            files=len(files),
            bytes=total,
            cached_bytes=sum(file.size or 0 for file in files if folder.is_complete(file)),
        )
        digests = self._fetch_digests(files)
        self._fetch_all([file for file in files if not is_sums(file.name)], digests)
        return files

    def _retry(self, description: str, call: Callable[[], T]) -> T:
        """Call until it raises no `TransientError`. Raises what `Retries.wait` raises."""
        retries = Retries(self._request, self._progress, self._stopped)
        while True:
            try:
                return call()
            except TransientError as error:
                retries.wait(description, error)

    def _list_files(self) -> list[RemoteFile]:
        files = self._source.list_files()
        if len(files) == 1 and files[0].name.endswith(INDEX):
            where = f"{self._request.field}: {files[0].name} of {self._request.url}"
            names = shards_of(self._read_small(files[0], LARGEST_INDEX), where)
            found = self._source.find_files([*names, *([SUMS] if self._request.sha256 else [])])
            if missing := sorted(set(names) - {file.name for file in found}):
                raise DataError(f"{where} names {missing[0]}, which is not next to it")
            files += found
        return files

    def _read_small(self, file: RemoteFile, max_bytes: int) -> bytes:
        content = b""
        for chunk in self._source.read(file, 0).chunks:
            content += chunk
            if len(content) > max_bytes:
                raise DataError(
                    f"{self._request.field}: {file.name} has more than {max_bytes} bytes"
                )
        return content

    def _fetch_digests(self, files: Sequence[RemoteFile]) -> Mapping[str, str]:
        """The digests of files by name; fetches what has them."""
        request, digests = self._request, dict[str, str]()
        names = {file.name for file in files}
        if request.sha256:
            pinned = files[0].name if len(files) == 1 else SUMS
            if pinned not in names:
                raise DataError(
                    f"{request.field}.sha256 is that of {SUMS} where there are several files, but "
                    f"the {len(files)} files of {request.url} have no {SUMS} among them"
                )
            digests[pinned] = request.sha256
        sums = [file for file in files if is_sums(file.name)]
        self._fetch_all(sums, digests)
        for file in sums:
            where = f"{request.field}: {file.name} of {request.url}"
            path = self._folder.files / file.name
            if path.stat().st_size > LARGEST_SUMS:
                raise DataError(f"{where} has more than {LARGEST_SUMS} bytes")
            folder = file.name.rpartition("/")[0]
            for written, digest in parse_sums(path.read_bytes(), where).items():
                name = written.removeprefix("./")
                name = f"{folder}/{name}" if folder else name
                if name in names:
                    digests[name] = digest
                elif not request.weights:  # of these a repository has more files
                    raise DataError(f"{where}: names {written!r}, which is not there")
        return digests

    def _fetch_all(self, files: Sequence[RemoteFile], digests: Mapping[str, str]) -> None:
        """Fetch files at the same time. Raises the first error."""
        if not files:
            return
        max_bytes = self._request.max_bytes  # of a file of unknown size
        if max_bytes is not None:
            is_known = all(file.size is not None for file in files)
            max_bytes = None if is_known else max_bytes - sum(file.size or 0 for file in files)
        pool = ThreadPoolExecutor(min(self._source.parallel, len(files)), "fetch")
        try:
            waiting: set[Future[None]] = {
                pool.submit(self._fetch_file, file, digests.get(file.name, ""), max_bytes)
                for file in files
            }
            saved_at = time.monotonic()
            while waiting:
                done, waiting = wait(waiting, _TICK_SECONDS, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
                self._progress.report()
                if time.monotonic() - saved_at > _SAVE_SECONDS:
                    self._folder.save()
                    saved_at = time.monotonic()
        except ChangedError:
            # the others end first: they are not to write when the files are listed again
            self._stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._stopped.clear()
            raise
        except BaseException:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def _fetch_file(self, file: RemoteFile, digest: str, max_bytes: int | None) -> None:
        """Fetch a file, unless it is there; `digest` is its SHA-256, empty if it is not known.

        Raises:
            ChangedError: it is no longer the listed one.
            DataError: it has more than `max_bytes`, or its digest is another one twice.
            StorageError: the server failed for too long.
            FetchStopped: the fetch has failed otherwise.
            OSError: this machine's disk failed.
        """
        expected = digest or file.sha256
        found = self._folder.check(file, expected)
        for is_last in (False, True):
            if found is None:
                found = self._retry(
                    file.name,
                    lambda: self._download(file, is_hashed=bool(expected), max_bytes=max_bytes),
                )
                if found == expected:
                    self._folder.finish(file, found)
            if found == expected:
                break
            self._folder.discard(file.name)
            self._progress.set_position(file.name, 0)
            if is_last:
                raise DataError(
                    f"{self._request.field}: the SHA-256 of {file.name} is {found} instead of "
                    f"{expected}, also when it is fetched again: correct the digest, or the file "
                    f"at {self._request.url}"
                )
            found = None
        self._progress.set_position(file.name, (self._folder.files / file.name).stat().st_size)
        self._progress.finish_file()

    def _download(self, file: RemoteFile, *, is_hashed: bool, max_bytes: int | None) -> str:
        """Download what is missing; returns the digest, empty if it is not wanted."""
        path = self._folder.partial(file.name)
        start = self._folder.partial_bytes(file)
        try:
            with path.open("r+b" if path.exists() else "w+b", buffering=0) as partial:
                digest = hashlib.sha256()
                if is_hashed:
                    _hash_start(partial, start, digest)
                position = start
                chunks: Iterator[bytes | memoryview] = iter(())
                if file.size is None or start < file.size:
                    body = self._source.read(file, start)
                    position, chunks = body.start, body.chunks
                    if position != start:
                        digest = hashlib.sha256()
                partial.truncate(position)
                partial.seek(position)
                self._progress.set_position(file.name, position)
                for chunk in chunks:
                    position += len(chunk)
                    if self._stopped.is_set():
                        raise FetchStopped
                    if max_bytes is not None and position > max_bytes:
                        raise too_large_error(self._request, at_least=position)
                    _write_all(partial, chunk)
                    if is_hashed:
                        digest.update(chunk)
                    self._progress.set_position(file.name, position)
        except OSError as error:
            if is_full(error):
                done, request = path.stat().st_size, self._request
                missing = "the rest of"
                if file.size is not None:
                    missing = f"{format_bytes(file.size - done)} of"
                raise DataError(
                    f"{request.field}: no space is left for {missing} {file.name}: "
                    f"{request.folder} has {format_bytes(free_bytes(request))} free: make room "
                    f"there, or raise {request.field}.size so that the pods are placed on nodes "
                    "with more space"
                ) from None
            raise
        if file.size is not None and position != file.size:
            raise ChangedError(f"{position} bytes came instead of {file.size}")
        return digest.hexdigest() if is_hashed else ""

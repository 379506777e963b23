"""Append-only lines of JSON: in a file, or in an object store, where nothing can be appended to.

There they are in segments, objects that are written as a whole and named by the time of their first
line. Free of torch. A writer may die within a line: readers skip what is not a whole JSON object,
and the next writer starts a new line.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.object_store.path import ObjectPath
from kdist_trainer.untrusted_text import MalformedTextError, parse_json

_TAIL_BYTES = 1 << 22
_PIECE_BYTES = 1 << 15
_COMPARED_BYTES = 512
"""Of the end of what was read: lines have the time in them, so that two files hardly agree in it.
"""
_SEGMENT_BYTES = 1 << 18

Shorten = Callable[[bytes], bytes]


class LineFile(ABC):
    """Lines that one process appends. Every method raises `OSError` if the storage fails."""

    @abstractmethod
    def append(self, data: bytes) -> None:
        """Append whole lines."""

    @abstractmethod
    def sync(self) -> None:
        """Return once what was appended is durable."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds; it may be called twice."""


def open_lines(path: StoragePath, shorten: Shorten | None = None) -> LineFile:
    """Open a file of lines for appending; in an object store, `shorten` makes those of a segment
    that has become long fewer. Raises `OSError`.
    """
    return SegmentedLines(path, shorten) if isinstance(path, ObjectPath) else AppendedLines(path)


class AppendedLines(LineFile):
    """Lines at the end of a file, after those of earlier processes."""

    def __init__(self, path: Path) -> None:
        storage.make_folder(path.parent, durable=True)
        self._handle = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, storage.FILE_MODE
        )
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")

    def append(self, data: bytes) -> None:
        """Append them in one write, as far as the system does."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view) :]

    def sync(self) -> None:
        """Sync the file."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def sync_lines(path: Path) -> None:
    """Sync a file of lines that need not be open; one that does not exist has none. Raises
    `OSError`.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class SegmentedLines(LineFile):
    """Lines of one process in objects of its own: the newest is written again, longer, at each
    sync, until it is long and cannot be shortened.
    """

    def __init__(self, folder: ObjectPath, shorten: Shorten | None = None) -> None:
        self._folder = folder
        self._shorten = shorten
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.jsonl"
        self._data = b""
        self._written = 0

    def append(self, data: bytes) -> None:
        """Keep them until the next sync."""
        with self._lock:
            self._data += data

    def sync(self) -> None:
        """Write the segment. What is appended meanwhile waits for the next sync."""
        with self._syncing:
            with self._lock:
                name, data = self._name, self._data
            if len(data) == self._written:
                return
            length = len(data)
            if self._shorten is not None and length >= _SEGMENT_BYTES:
                data = self._shorten(data)
            storage.write_new(self._folder / name, data)
            with self._lock:
                rest = self._data[length:]
                if length >= _SEGMENT_BYTES and len(data) > _SEGMENT_BYTES // 2:
                    self._begin()
                    self._data = rest
                else:
                    self._written, self._data = len(data), data + rest

    def close(self) -> None:
        """Do nothing: nothing is open."""


def find_files(path: StoragePath) -> dict[StoragePath, int]:
    """The files, with their sizes, that hold the lines, oldest first; empty before the first line.
    Raises `OSError`.
    """
    if isinstance(path, ObjectPath):
        return {path / name: size for name, size in sorted(path.files().items())}
    try:
        return {path: path.stat().st_size}
    except FileNotFoundError:
        return {}


def read_pieces(file: StoragePath) -> Iterable[memoryview | bytes]:
    """The content of one of `find_files`, each piece valid until the next is asked for: a segment
    is read by one request. Raises `OSError`.
    """
    return [file.read_bytes()] if isinstance(file, ObjectPath) else storage.read_pieces(file)


def read_lines(path: StoragePath) -> list[dict[str, Any]]:
    """All lines, oldest first; of several processes at once, segment after segment. Raises
    `OSError`.
    """
    if isinstance(path, ObjectPath):
        return [
            line
            for name in sorted(path.files())
            for line in parse_lines((path / name).read_bytes())
        ]
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return parse_lines(data)


def read_newest(path: StoragePath) -> Iterator[list[dict[str, Any]]]:
    """The newest lines, some megabytes of them, in pieces: the newest piece first, the lines of
    each oldest first. A caller that has found what it looks for need not parse the others. Raises
    `OSError`.
    """
    if isinstance(path, ObjectPath):
        left = _TAIL_BYTES
        for name, size in sorted(path.files().items(), reverse=True):
            if left <= 0:
                break
            yield parse_lines((path / name).read_bytes())
            left -= size
        return
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        first, rest = max(0, end - _TAIL_BYTES), b""
        while end > first:
            start = max(first, end - _PIECE_BYTES)
            file.seek(start)
            data, end = file.read(end - start) + rest, start
            cut = 0
            if start:  # the first line may begin before this piece
                cut = data.find(b"\n") + 1 or len(data)
            rest = data[:cut]
            yield parse_lines(data[cut:])


class GrowingLines:
    """The lines of a file that others append to: each reading parses only what is new. In an object
    store, all is read each time.
    """

    def __init__(self, path: StoragePath) -> None:
        self._path = path
        self._known = _Known()

    def read(self) -> list[dict[str, Any]]:
        """See `read_lines`."""
        if isinstance(self._path, ObjectPath):
            return read_lines(self._path)
        known = self._known
        try:
            with self._path.open("rb") as file:
                # another file may have taken its place, which need not be a shorter one
                file.seek(max(0, known.end - len(known.last)))
                if file.read(len(known.last)) != known.last:
                    known = _Known()
                    file.seek(0)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._known = known.followed_by(data[:whole])
        return [*self._known.lines, *parse_lines(data[whole:])]


class _Known(NamedTuple):
    """What is known of a file that grows."""

    lines: tuple[dict[str, Any], ...] = ()
    end: int = 0
    """Bytes that were parsed."""
    last: bytes = b""
    """The last of them."""

    def followed_by(self, data: bytes) -> _Known:
        """What is known with some more bytes, of whole lines."""
        if not data:
            return self
        last = (self.last + data)[-_COMPARED_BYTES:]
        return _Known((*self.lines, *parse_lines(data)), self.end + len(data), last)


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The lines of a file, in their order, without those that are torn."""
    found = []
    for line in data.splitlines():
        with suppress(MalformedTextError):  # an incomplete line, or bytes that are not text
            document = parse_json(line, allow_nan=True)
            if isinstance(document, dict):
                found.append(document)
    return found

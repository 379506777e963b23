"""The ledger of a run, next to its checkpoints: one line of JSON per step and one per event,
append-only.

It outlives processes and pods: restarts are counted in it and the use of samples is audited by it.
Free of torch: the agent and the command line read and write it too.

The lines are in a file or, in an object store, where nothing can be appended to, in segments:
objects that are written as a whole and named by the time of their first line. A writer may die
within a line: readers skip what is not a whole JSON object, and the next writer starts a new line.

Events are kept few: a run that saves every minute for a year would write hundreds of megabytes,
which every restart reads. Rank 0 shortens them after a commit, when nobody else writes but an agent
that begins a generation; in an object store each process does it with the object that it writes
anyway. Commits that are not among the newest become one line for each run of them, with their sums,
and the oldest of the other lines go.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.formats import EVENTS_FILE, LEDGER, STEPS_FILE, check_format, stamp
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, number_of, parse_json
from kdist_trainer.object_store.store import ObjectPath

_TAIL_BYTES = 1 << 22
_PIECE_BYTES = 1 << 15
_COMPARED_BYTES = 512
"""Of the end of what was read: lines have the time in them, so that two files hardly agree in it.
"""
_SEGMENT_BYTES = 1 << 18

Shorten = Callable[[bytes], bytes]


class AppendedLines:
    """Lines that one process appends, at the end of a file, after those of earlier processes. Every
    method raises `OSError` if the storage fails.
    """

    def __init__(self, path: Path) -> None:
        storage.make_folder(path.parent, durable=True)
        self._handle = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, storage.FILE_MODE
        )
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")

    def append(self, data: bytes) -> None:
        """Append whole lines, in one write, as far as the system does. What a disk has taken of
        them before it refuses the rest is taken back, so that they can be appended again.
        """
        view, written = memoryview(data), 0
        try:
            while written < len(data):
                written += os.write(self._handle, view[written:])
        except OSError:
            end = os.lseek(self._handle, 0, os.SEEK_CUR)  # of what this process has appended
            if written and os.fstat(self._handle).st_size == end:
                os.ftruncate(self._handle, end - written)
            raise

    def sync(self) -> None:
        """Return once what was appended is durable."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; it may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class SegmentedLines:
    """Lines of one process in objects of its own: the newest is written again, longer, at each
    sync, until it is long and `shorten` cannot make its lines fewer.
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


LineFile = AppendedLines | SegmentedLines


def open_lines(path: StoragePath, shorten: Shorten | None = None) -> LineFile:
    """Open a file of lines for appending. Raises `OSError`."""
    return SegmentedLines(path, shorten) if isinstance(path, ObjectPath) else AppendedLines(path)


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
    lines = []
    for file in find_files(path):
        with suppress(FileNotFoundError):  # archived since
            lines += parse_lines(file.read_bytes())
    return lines


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


Event = Mapping[str, Any]

MOST_BYTES: Final = 1 << 20
_COMMITS: Final = 100
"""Newest commits that keep a line each."""
_OTHERS: Final = 2000
"""Newest lines of other kinds that stay."""
_OTHERS_OF_SEGMENT: Final = 500
"""The same in one object of a process."""
_SUMS: Final = ("seconds", "visible_seconds")


def shorten_segment(data: bytes) -> bytes:
    """The lines of one object of a process, without details of what is long past."""
    return encode_lines(shorten(parse_lines(data), others=_OTHERS_OF_SEGMENT))


def shorten(events: Sequence[Event], *, others: int = _OTHERS) -> list[Event]:
    """The events, oldest first, without details of what is long past; `others` is how many stay
    that are no commits.
    """
    commits = [index for index, each in enumerate(events) if each.get("event") == "commit"]
    single = set(commits[-_COMMITS:])
    found: deque[Event] = deque()
    for index, each in enumerate(events):
        last = found[-1] if found else {}
        is_old = each.get("event") == "commit" and index not in single
        if is_old and last.get("event") == "commit":
            found[-1] = merge((last, each))
        else:
            found.append(each)
    surplus = len(found) - len(single) - others
    return list(found)[max(0, surplus) :]


def merge(commits: Iterable[Event]) -> dict[str, Any]:
    """One line of several commits: the last one's, with the sums of all; `commits` says how many
    they were, and `written` how many bytes.
    """
    commits = list(commits)
    merged = dict(commits[-1])
    for name in _SUMS:
        merged[name] = round(sum(number_of(each, name) for each in commits), 4)
    merged["commits"] = sum(count_commits(each) for each in commits)
    merged["written"] = sum(count_bytes_written(each) for each in commits)
    return merged


def count_commits(event: Event) -> int:
    """How many commits a line stands for."""
    number = event.get("commits")
    return number if type(number) is int and number > 0 else 1


def count_bytes_written(event: Event) -> int:
    """How many bytes the commits of a line have written."""
    return int(number_of(event, "bytes" if event.get("written") is None else "written"))


def encode_lines(events: Iterable[Event]) -> bytes:
    """One line of JSON for each."""
    return "".join(encode_json(each, separators=(",", ":")) + "\n" for each in events).encode()


StepKey = tuple[int, int]
"""Generation and step of a line of `steps.jsonl`."""


class StepLedger:
    """`steps.jsonl`, written by rank 0.

    A line has step, generation, world_size, first and last sample, loss (`float.hex`), seconds and
    wait_seconds: the part of the seconds spent waiting in all-reduces, as far as it was known when
    the line was written. The loss is null if a rank has died with its part of it before any other
    had received the mean.
    """

    def __init__(self, root: StoragePath) -> None:
        self._lines = open_lines(root / LEDGER / STEPS_FILE)

    @staticmethod
    def find_written(root: StoragePath, wanted: Collection[StepKey]) -> set[StepKey]:
        """Which of these lines, by generation and step, are among the newest ones. Nothing is read
        but what may have one of them.
        """
        found: set[StepKey] = set()
        with suppress(OSError):
            for lines in read_newest(root / LEDGER / STEPS_FILE) if wanted else ():
                keys = [
                    (int(line["generation"]), int(line["step"])) for line in lines if "step" in line
                ]
                found.update(key for key in keys if key in wanted)
                if len(found) == len(wanted) or (keys and keys[0] < min(wanted)):
                    break
        return found

    @staticmethod
    def find_last_step(root: StoragePath, generation: int) -> int:
        """The last step of a generation among the newest lines; 0 if they have none of it."""
        with suppress(OSError):
            for lines in read_newest(root / LEDGER / STEPS_FILE):
                own = [each for each in lines if each.get("generation") == generation]
                if steps := [int(each["step"]) for each in own if "step" in each]:
                    return max(steps)
                last = lines[-1].get("generation") if lines else None
                if isinstance(last, int) and last < generation:
                    break  # it has written none
        return 0

    @staticmethod
    def sync_file(root: StoragePath) -> None:
        """Make all lines durable that were written to a file which is closed by now. In an object
        store nothing is written that is not durable. Raises `OSError`.
        """
        if not isinstance(root, Path):
            return
        try:
            handle = os.open(root / LEDGER / STEPS_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append one line per document in one write; in an object store they are kept until the
        next sync. Raises `OSError`.
        """
        self._lines.append(encode_lines(lines))

    def sync(self) -> None:
        """Make all lines durable, before a checkpoint of their steps is committed. Raises
        `OSError`.
        """
        self._lines.sync()

    def close(self) -> None:
        """Close the file; it may be called twice."""
        self._lines.close()


class RunLedger:
    """`events.jsonl`, one line per event, written by the agent of group rank 0, by rank 0, and by a
    rank that writes a save alone (`CarriedSave` in `checkpoint.writer`).
    """

    def __init__(self, root: StoragePath) -> None:
        self._events = root / LEDGER / EVENTS_FILE
        self._lines = GrowingLines(self._events)
        self._steps = root / LEDGER / STEPS_FILE

    def append(self, event: str, **fields: Any) -> None:
        """Append an event with the current time (Unix seconds) in one write, and sync it. Raises
        `OSError`.
        """
        line = encode_json(
            stamp(EVENTS_FILE, {"time": round(time.time(), 3), "event": event, **fields}),
            separators=(",", ":"),
            default=str,
        )
        lines = _open_events(self._events)
        try:
            lines.append(line.encode() + b"\n")
            lines.sync()
        finally:
            lines.close()

    def bound(self) -> bool:
        """Write the events again, shorter, if they are too long; returns whether they were. In an
        object store, no process writes those of another. Raises `OSError`; the events are the old
        or the new ones then.
        """
        path = self._events
        if not isinstance(path, Path) or path.stat().st_size <= MOST_BYTES:
            return False
        with path.open("rb") as former:
            storage.replace(path, encode_lines(shorten(parse_lines(former.read()))))
            late = former.read()  # what another process has appended to the former file meanwhile
        if late:
            with path.open("ab") as file:
                file.write(late)
        return True

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first. Raises `OSError` if they exist but cannot be read, or
        `NewerFormatError` if a newer version wrote one.
        """
        events = [one for one in self._lines.read() if isinstance(one.get("event"), str)]
        for each in events:
            check_format(EVENTS_FILE, each)
        if isinstance(self._events, ObjectPath):  # segment after segment
            events.sort(key=lambda event: number_of(event, "time"))
        return events

    def last_generation(self) -> int:
        """The highest recorded generation; 0 before the first."""
        numbers = (one.get("generation") for one in self.events() if one["event"] == "generation")
        return max((number for number in numbers if isinstance(number, int)), default=0)

    def sum_steps(
        self, events: Iterable[Mapping[str, Any]], *, most: int | None = None
    ) -> list[dict[str, Any]]:
        """The lines of `steps.jsonl` in bounded memory, successive ones merged where there are many
        (`step_lines`), into about `most` records.

        Raises:
            OSError: the storage failed.
            NewerFormatError: a newer version wrote a line.
        """
        from kdist_trainer.formats.step_lines import StepLines

        files = find_files(self._steps)
        lines = StepLines(events, nbytes=sum(files.values()), most=most)
        for file in files:
            for piece in read_pieces(file):
                lines.add(piece)
            lines.end_file()
        return lines.records()

    def copy_steps(self, target: Path) -> None:
        """Copy `steps.jsonl` to a file on a disk, which is replaced at once. Raises `OSError`."""
        with storage.replacing(target) as copy:
            for file in find_files(self._steps):
                for piece in read_pieces(file):
                    copy.write(piece)


def find_last_sign(events: Iterable[Mapping[str, Any]], root: StoragePath | None) -> float:
    """When a run last made progress, in Unix seconds: by its events, and by the newest line of its
    steps. What a node has done after that and was lost with it is not known.
    """
    now = time.time()
    times = [number_of(each, "time") for each in events]
    if root is not None:
        with suppress(OSError):
            files = find_files(root / LEDGER / STEPS_FILE)
            times += [storage.modified_at(each) or 0.0 for each in files]
    return min(now, max(times, default=now))


_segments: dict[tuple[int, ObjectPath], LineFile] = {}
_opening = threading.Lock()


def _open_events(path: StoragePath) -> LineFile:
    """The file of events; in an object store one for the whole process, whose events are in few
    objects then.
    """
    if not isinstance(path, ObjectPath):
        return open_lines(path)
    with _opening:
        own = (os.getpid(), path)  # a forked process must not write to its parent's object
        if own not in _segments:
            _segments[own] = open_lines(path, shorten_segment)
        return _segments[own]

"""Entries of a node's log file, and a tail that follows the file while it grows.

The agent writes the output of its ranks in whole lines, each behind its rank. Other output comes as
it was written: unfinished lines, carriage returns, bytes that are not text.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from kdist.events.parser import Event, split_line

# Bytes per read, so that a flood of prints cannot hold up the loop that reads.
_MAX_READ = 1 << 17
_MAX_LINE = 1 << 16
_RANK_PREFIX = re.compile(r"(\[rank\d+\]:) ?")
_UNFINISHED_LINE_TIMEOUT = 1.0  # seconds


class Entry(NamedTuple):
    """One entry of a node's log: either an event, or printed text.

    Attributes:
        node: name of the node, or `kdist` for events of the command itself.
        event: the event; None for printed text.
        text: the printed text, with the prefix of its rank if a rank printed it.
        is_progress_bar: whether the text is a state of a progress bar, which the next one replaces.
    """

    node: str
    event: Event | None
    text: str
    is_progress_bar: bool = False

    @property
    def prefix(self) -> str:
        """Source of the text: `[rank3]:` if a rank printed it, otherwise `[node-0]`."""
        rank = _RANK_PREFIX.match(self.text)
        return rank[1] if rank else f"[{self.node}]"

    @property
    def body(self) -> str:
        """The text without the prefix of its rank."""
        rank = _RANK_PREFIX.match(self.text)
        return self.text[rank.end() :] if rank else self.text


class LogTail:
    """Follows one log file, from its present end or, with `from_start`, from its first line. `read`
    never blocks.

    Attributes:
        behind: whether the last `read` left data for the next one.
    """

    def __init__(
        self,
        node: str,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        from_start: bool = False,
    ) -> None:
        self.node = node
        self.behind = False
        self._path = path
        self._clock = clock
        self._older = path.with_name(path.name + ".1")  # what the agent wrote before it
        first = self._older if from_start and self._older.exists() else path
        self._file = first.stat().st_ino if first.exists() else 0
        self._offset = path.stat().st_size if path.exists() and not from_start else 0
        self._unfinished = b""
        self._last_growth = clock()

    def read(self, *, last: bool = False) -> Iterator[Entry]:
        """Yield the entries added since the last call.

        An unfinished line is held back for up to a second, so that a line written in pieces stays
        one entry. With `last` it counts as a line, and the whole rest of the file is read.
        """
        self.behind = False
        while chunk := self._read_chunk():
            yield from self._split(chunk)
            if not last and len(chunk) == _MAX_READ:
                self.behind = True
                return
        if self._unfinished and (
            last
            or self._clock() - self._last_growth > _UNFINISHED_LINE_TIMEOUT
            or len(self._unfinished) > _MAX_LINE
        ):
            line = self._unfinished
            self._unfinished = b""
            yield from self._entries(line)

    def _read_chunk(self) -> bytes:
        try:
            with self._path.open("rb") as log:
                current = os.fstat(log.fileno()).st_ino
                if self._file not in (0, current):
                    if chunk := self._read_older():
                        return chunk
                    self._offset = 0
                self._file = current
                log.seek(self._offset)
                chunk = log.read(_MAX_READ)
        except FileNotFoundError:
            return b""
        self._offset += len(chunk)
        return chunk

    def _read_older(self) -> bytes:
        """Read on in the file that was replaced; empty at its end, or if it is gone."""
        try:
            with self._older.open("rb") as log:
                if os.fstat(log.fileno()).st_ino != self._file:
                    return b""
                log.seek(self._offset)
                chunk = log.read(_MAX_READ)
        except FileNotFoundError:
            return b""
        self._offset += len(chunk)
        return chunk

    def _split(self, chunk: bytes) -> Iterator[Entry]:
        self._last_growth = self._clock()
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        for line in lines:
            yield from self._entries(line)

    def _entries(self, line: bytes) -> Iterator[Entry]:
        printed, event, is_progress_bar = split_line(line.decode(errors="replace"))
        if printed.strip() or event is None:
            yield Entry(self.node, None, printed, is_progress_bar)
        if event is not None:
            yield Entry(self.node, event, "")


def read_files(files: Mapping[str, Path], *, tail: int | None = None) -> Iterator[Entry]:
    """Yield the entries of whole log files in the order of their times.

    Args:
        files: by the nodes that they are of.
        tail: only the last entries of each; None for all.
    """
    timed: list[tuple[float, Entry]] = []
    for node, file in files.items():
        found = read_timed(LogTail(node, file, from_start=True), last=True)
        timed += found if tail is None else found[len(found) - min(tail, len(found)) :]
    for _, entry in sorted(timed, key=lambda each: each[0]):
        yield entry


def read_timed(tail: LogTail, *, last: bool) -> list[tuple[float, Entry]]:
    """The new entries with their times; printed text has the time of the event before it."""
    found: list[tuple[float, Entry]] = []
    at = 0.0
    while True:
        for entry in tail.read(last=last):
            at = _time_of(entry) or at
            found.append((at, entry))
        if not tail.behind:
            return found


def _time_of(entry: Entry) -> float | None:
    try:
        return datetime.fromisoformat(str((entry.event or {})["time"])).timestamp()
    except (KeyError, ValueError):
        return None


def last_printed_line(path: Path) -> str:
    """Return the last non-blank line of a log that is not an event; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _MAX_LINE))
            lines = log.read().split(b"\n")
    except OSError:
        return ""
    decoded = (line.decode(errors="replace") for line in reversed(lines))
    printed = (split_line(line).printed.strip() for line in decoded)
    return next((line for line in printed if line), "")


def with_time(entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
    """Yield each entry with its time, as text that sorts; printed text has the time of the event
    before it.
    """
    time = ""
    for entry in entries:
        time = str((entry.event or {}).get("time", time))
        yield time, entry

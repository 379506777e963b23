"""Reads a node's growing log: the trainer's events (JSON lines) and, between them, whatever the ranks print.

The agent writes what its ranks print in whole lines, each behind its rank. What is no rank's comes as it was written: lines
without an end, an event behind them, carriage returns, bytes that are no text; none of it may hide an event.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_EVENT_START = b'{"time"'
_LONGEST_READ = 1 << 17  # bytes taken at once, so that a flood of prints cannot hold up the loop that reads
_LONGEST_LINE = 1 << 16
_RANK = re.compile(r"(\[rank\d+\]:) ?")
_PATIENCE = 1.0  # seconds an unfinished line waits for its end


class Entry(NamedTuple):
    """One line of a node's log: an event, or text that somebody printed."""

    node: str
    event: dict[str, Any] | None
    text: str
    is_state: bool = False
    """Whether it is a state of a progress bar, which the next one replaces."""

    @property
    def speaker(self) -> tuple[str, str]:
        """Who printed the text, as it is shown before it, and the text: a rank, else what belongs to the node."""
        rank = _RANK.match(self.text)
        return (rank[1], self.text[rank.end() :]) if rank else (f"[{self.node}]", self.text)


class LogTail:
    """Follows one log from where it ends now. `read` never blocks."""

    def __init__(self, node: str, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.node = node
        self._path = path
        self._clock = clock
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._grown_at = clock()
        self.behind = False  # whether the last look left something for the next

    def read(self, *, last: bool = False) -> Iterator[Entry]:
        """What was added since the last call. With `last` an unfinished line counts as a line and nothing is left for later."""
        self.behind = False
        while chunk := self._take():
            yield from self._split(chunk)
            if not last and len(chunk) == _LONGEST_READ:
                self.behind = True
                return
        if self._rest and (last or self._clock() - self._grown_at > _PATIENCE or len(self._rest) > _LONGEST_LINE):
            rest, self._rest = self._rest, b""
            yield from self._entries(rest)

    def _take(self) -> bytes:
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                chunk = log.read(_LONGEST_READ)
        except FileNotFoundError:
            return b""
        self._offset += len(chunk)
        return chunk

    def _split(self, chunk: bytes) -> Iterator[Entry]:
        self._grown_at = self._clock()
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield from self._entries(line)

    def _entries(self, line: bytes) -> Iterator[Entry]:
        start = line.find(_EVENT_START)
        event = _parse(line[start:]) if start >= 0 else None
        printed = line if event is None else line[:start]
        text = printed.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
        if text.strip() or event is None:
            yield Entry(self.node, None, text, is_state=printed.endswith(b"\r"))
        if event is not None:
            yield Entry(self.node, event, "")


def last_words(path: Path) -> str:
    """The last line with something on it that is no event, from the end of the log; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LONGEST_LINE))
            lines = log.read().splitlines()
    except OSError:
        return ""
    words = (line.decode(errors="replace").strip() for line in reversed(lines) if _parse(line) is None)
    return next((line for line in words if line), "")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None

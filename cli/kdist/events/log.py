"""Lines of logs: a trainer's event (a line of JSON) or what a rank printed. `LogTail` follows the
log of a local node, `Line` is a line of a pod's log, `RankFilter` picks the lines of some ranks.

The agent writes the output of its ranks in whole lines, each behind its rank. Other output comes
as it was written: lines without an end, an event behind them, carriage returns, bytes that are not
text. None of it may hide an event.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kdist.status import Pod

_EVENT_PREFIX = b'{"time"'
# bytes taken at once, so that a flood of prints cannot hold up the loop that reads
_LONGEST_READ = 1 << 17
_LONGEST_LINE = 1 << 16
_RANK_PREFIX = re.compile(r"(\[rank\d+\]:) ?")
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
        """Who printed the text, as it is shown before it, and the text: a rank, else what belongs
        to the node.
        """
        rank = _RANK_PREFIX.match(self.text)
        return (rank[1], self.text[rank.end() :]) if rank else (f"[{self.node}]", self.text)


class LogTail:
    """Follows one log from where it ends now. `read` never blocks."""

    def __init__(
        self, node: str, path: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node = node
        self._path = path
        self._clock = clock
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._grown_at = clock()
        self.behind = False  # whether the last look left something for the next

    def read(self, *, last: bool = False) -> Iterator[Entry]:
        """What was added since the last call. With `last` an unfinished line counts as a line and
        nothing is left for later.
        """
        self.behind = False
        while chunk := self._take():
            yield from self._split(chunk)
            if not last and len(chunk) == _LONGEST_READ:
                self.behind = True
                return
        if self._rest and (
            last or self._clock() - self._grown_at > _PATIENCE or len(self._rest) > _LONGEST_LINE
        ):
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
        start = line.find(_EVENT_PREFIX)
        event = _parse(line[start:]) if start >= 0 else None
        printed = line if event is None else line[:start]
        text = printed.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
        if text.strip() or event is None:
            yield Entry(self.node, None, text, is_state=printed.endswith(b"\r"))
        if event is not None:
            yield Entry(self.node, event, "")


def last_words(path: Path) -> str:
    """The last line with something on it that is no event, from the end of the log; empty if there
    is none.
    """
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LONGEST_LINE))
            lines = log.read().splitlines()
    except OSError:
        return ""
    words = (
        line.decode(errors="replace").strip() for line in reversed(lines) if _parse(line) is None
    )
    return next((line for line in words if line), "")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


_EVENT_START = '{"time"'
_RANK = re.compile(r"\[rank(\d+)\]:")


@dataclass(frozen=True)
class Line:
    """One line that a container wrote. `stamp` is its time as the kubelet writes it; they compare
    as text.
    """

    pod: Pod
    stamp: str
    text: str

    @cached_property
    def event(self) -> dict[str, Any] | None:
        """The trainer's event in it, which may stand behind something printed without an end of
        line.
        """
        start = self.text.find(_EVENT_START)
        if start < 0:
            return None
        try:
            event = json.loads(self.text[start:])
        except (ValueError, RecursionError):
            return None
        return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None

    @property
    def printed(self) -> str:
        """What was printed, without the event and without what a progress bar wrote over."""
        text = self.text if self.event is None else self.text[: self.text.find(_EVENT_START)]
        return text.rstrip("\r").rsplit("\r", 1)[-1]

    @property
    def source(self) -> str:
        """The pod's name without the letters that a Job adds: `digits-0`."""
        index = self.pod.index
        head, _, tail = self.pod.name.rpartition("-")
        return (
            head
            if index is not None and head.endswith(f"-{index}") and len(tail) == 5
            else self.pod.name
        )


class RankFilter:
    """Passes the lines of some ranks: events that name one, and what ranks print, which stands
    behind `[rank3]: `.

    What has no rank on it is passed if its pod holds one of them. Agents say whom they start;
    `known` are the ranks of each pod as far as they told.
    """

    def __init__(self, wanted: Collection[int], known: Mapping[str, Collection[int]]) -> None:
        self._wanted = frozenset(wanted)
        self._here: dict[str, set[int]] = {pod: set(ranks) for pod, ranks in known.items()}

    def passes(self, line: Line) -> bool:
        """Whether the line is of one of the ranks; lines of one pod must come in their order."""
        event = line.event
        printed = _RANK.match(line.text)
        rank = event.get("rank") if event else int(printed[1]) if printed else None
        if event and event["event"] == "rendezvous-completed":
            self._here[line.pod.name] = set()
        if isinstance(rank, int):
            if event and event["event"] == "worker-started":
                self._here.setdefault(line.pod.name, set()).add(rank)
            return rank in self._wanted
        return bool(self._wanted & self._here.get(line.pod.name, set()))

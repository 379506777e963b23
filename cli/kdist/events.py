"""Reads a node's growing log: the trainer's events (JSON lines) and, between them, whatever the
ranks print.

The agent writes what its ranks print in whole lines, each behind its rank. What is no rank's comes
as it was written: lines without an end, an event behind them, carriage returns, bytes that are no
text; none of it may hide an event.

Lines of pods' logs: what is an event in them, and of which ranks they are.

Events become lines for people and for grep: time, node, the event's name, and a sentence.

    2026-01-31T12:00:01Z node-0 checkpoint-committed  step 100 committed in 0.21 s, the training waited 3 ms (1.2 MiB)

The columns and the names of events are stable; the sentence may get better. What a rank prints
stands behind `[rank3]: `, what no rank has printed behind `[node-0] `.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kdist.status import Pod
from kdist.units import is_number, number, rate, seconds, size

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
        if event and event["event"] == "group-formed":
            self._here[line.pod.name] = set()
        if isinstance(rank, int):
            if event and event["event"] == "worker-started":
                self._here.setdefault(line.pod.name, set()).add(rank)
            return rank in self._wanted
        return bool(self._wanted & self._here.get(line.pod.name, set()))


Event = Mapping[str, Any]

# others are said by rank 0 for all
_EVERY_RANK_SPEAKS = {"worker-failed", "hang", "failed", "checkpoint-failed"}
_SILENT = {
    "worker-started",
    "rendezvous-started",
    "agent-done",
    "bench-pairs",
}  # seen in the view's state, of no interest once past
_ENVELOPE = {"time", "event", "level", "job", "node", "rank", "generation", "message"}


def _count(number: object, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _group_formed(e: Event) -> str:
    nodes = f" on {_count(e['nodes'], 'node')}" if "nodes" in e else ""
    return (
        f"{_count(e['world_size'], 'rank')}{nodes}, generation {e['generation']} "
        f"({e.get('reason', 'start')})"
    )


def _progress(e: Event) -> str:
    of = f"/{e['target']}" if e.get("target") else ""
    fast = (
        f", {number(round(e['samples_per_second']))} samples/s"
        if is_number(e.get("samples_per_second"))
        else ""
    )
    fast += (
        f", learning rate {number(e['learning_rate'], 3)}"
        if is_number(e.get("learning_rate"))
        else ""
    )
    return f"step {e['step']}{of}, loss {number(e['loss'])}{fast}"


def _committed(e: Event) -> str:
    waited = (
        f", the training waited {seconds(e['visible_seconds'])}" if "visible_seconds" in e else ""
    )
    much = f" ({size(e['bytes'])})" if "bytes" in e else ""
    return f"step {e['step']} committed in {seconds(e['seconds'])}{waited}{much}"


def _worker_failed(e: Event) -> str:
    if e.get("primary") is False:
        return f"rank {e.get('rank')} lost its peers ({e['cause']})"
    if e.get("signal"):
        return f"rank {e.get('rank')} ended by {e['signal']} ({e['cause']})"
    how = f" with code {e['code']}" if e.get("code") is not None else ""
    return f"rank {e.get('rank')} ended{how} ({e['cause']}){_said(e)}"


def _said(e: Event) -> str:
    """The first line of the event's message, which may be a whole page of C++."""
    words = str(e.get("message") or "").partition("\n")[0]
    return f": {words[:200]}" if words else ""


def _metrics(e: Event) -> str:
    found = (
        e["metrics"]
        if isinstance(e.get("metrics"), Mapping)
        else {k: v for k, v in e.items() if k not in _ENVELOPE | {"step"}}
    )
    return ", ".join(f"{name} {number(value)}" for name, value in found.items()) or "evaluated"


def _bench_row(e: Event) -> str:
    much = f"{size(e['size'])}: bus bandwidth {rate(e['busbw'])}, " if e["size"] else ""
    wrong = f", {e['wrong']} WRONG" if e["wrong"] else ""
    return f"{much}mean {seconds(e['mean'])}, p99 {seconds(e['p99'])}, {e['rounds']} rounds{wrong}"


def _bench_slow(e: Event) -> str:
    who = (
        f"rank {e['ranks'][0]}"
        if len(e["ranks"]) == 1
        else f"ranks {e['ranks'][0]} and {e['ranks'][1]}"
    )
    return (
        f"slow: {who} ({', '.join(e['nodes'])}), {seconds(e['seconds'])} for a message, "
        f"{e['ratio']:.1f} times the others"
    )


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "bench-begun": lambda e: (
        f"{e['collective']} among {_count(e['ranks'], 'rank')} ({e['device']}, {e['backend']})"
    ),
    "bench-row": _bench_row,
    "preflight": lambda e: (
        f"bus bandwidth {rate(e['busbw'])} among {e['ranks']} ranks, {rate(e['demanded'])} demanded"
    ),
    "bench-slow": _bench_slow,
    "bench-done": lambda e: (
        f"{e['wrong']} elements wrong" if e["wrong"] else "every result was right"
    ),
    "agent-started": lambda e: f"agent started, pid {e['pid']}",
    "agent-ended": lambda e: f"agent ended {_how(e['code'])}",
    "agent-restarting": lambda e: (
        f"agent ended {_how(e['code'])}; starts again in {seconds(e['seconds'])}"
    ),
    "agent-killed": lambda e: f"agent and ranks killed: {e['reason']}",
    "group-formed": _group_formed,
    "started-fresh": lambda _: "no checkpoint: starts from the beginning",
    "resumed": lambda e: (
        f"resumed after step {e['step']}"
        + (f", {number(e['samples_seen'])} samples seen" if "samples_seen" in e else "")
    ),
    "first-step": lambda e: f"step {e['step']} done, the first of this generation",
    "progress": _progress,
    "checkpoint-committed": _committed,
    "checkpoint-failed": lambda e: (
        f"a checkpoint could not be saved ({e['cause']}): {e.get('error', '')}; the "
        "training goes on"
    ),
    "checkpoint-fell-back": lambda e: (
        f"a checkpoint is damaged, took the one before: step {e['step']} ({e['reason']})"
    ),
    "worker-failed": _worker_failed,
    "restarting": lambda e: (
        f"starts again, restart {e['restarts']} of {e['budget']} ({e['cause']}){_said(e)}"
    ),
    "joining": lambda e: (
        f"{_count(e['waiting'], 'node')} waiting to join: saves, then forms the larger group"
    ),
    "stopping": lambda e: f"saves and stops ({e['reason']})",
    "stopped": lambda e: f"stopped after step {e['step']}, state saved",
    "evaluated": _metrics,
    "done": lambda e: f"done after step {e['step']}",
    "hang": lambda e: (
        f"rank {e['rank']} hangs in {e['phase']}"
        + (f", inside {e['collective']}" if e.get("collective") else "")
    ),
    "failed": lambda e: f"failed: {e['cause']}{_said(e)}",
    "job-edited": lambda e: f"the job was edited since its checkpoint: {e['message']}",
    "past-end": lambda e: str(e["message"]),
    "not-bit-equal": lambda e: f"the resume is correct but not equal to the bit: {e['why']}",
}


def _how(code: object) -> str:
    return f"by signal {-code}" if isinstance(code, int) and code < 0 else f"with code {code}"


def describe_event(event: Event) -> str:
    """The event's sentence; events without one, or with fields missing, are shown by their
    fields.
    """
    sentence = _SENTENCES.get(event["event"])
    if sentence:
        try:
            return sentence(event)
        except (KeyError, TypeError, ValueError):
            pass
    fields = [
        f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in event.items()
        if name not in _ENVELOPE
    ]
    return " ".join([*([str(event["message"])] if event.get("message") else []), *fields])


class EventFilter:
    """Decides which events become lines: what several agents or ranks say in the same words is said
    once.

    `lines_only` is true where no live view shows the progress.
    """

    def __init__(self, *, lines_only: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines_only = lines_only
        self._clock = clock
        self._began = clock()
        self._next_progress = 0.0
        self._said: dict[str, str] = {}

    def is_news(self, event: Event) -> bool:
        """Whether to show it."""
        name = event["event"]
        if name in _SILENT or (
            event.get("rank") not in (None, 0) and name not in _EVERY_RANK_SPEAKS
        ):
            return False
        if name in ("progress", "waiting"):  # the live view shows these by itself
            return self._lines_only and (name == "waiting" or self._is_due())
        if name.startswith("agent-"):
            return True
        words = f"{event.get('generation')} {describe_event(event)}"
        if self._said.get(name) == words:
            return False
        self._said[name] = words
        return True

    def _is_due(self) -> bool:
        """Progress is told every 2 s in the first minute, then every 10 s, after ten minutes every
        60 s.
        """
        now = self._clock()
        if now < self._next_progress:
            return False
        age = now - self._began
        self._next_progress = now + (2 if age < 60 else 10 if age < 600 else 60)
        return True


def format_line(entry: Entry) -> str:
    """The stable line of an entry, without colour."""
    if entry.event is None:
        return " ".join(entry.speaker)
    return (
        f"{_second(entry.event.get('time'))} {entry.node} {entry.event['event']:<21} "
        f"{describe_event(entry.event)}"
    ).rstrip()


def _second(stamp: object) -> str:
    """An event's time, cut to the second."""
    return (
        f"{stamp[:19]}Z"
        if isinstance(stamp, str) and len(stamp) >= 19
        else f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    )

"""Trainer events in logs: recognizes them, tails the log of a node, and formats events as text.

An event is a JSON object that starts with its time, at the start of a line (`kdist_trainer.log`
defines the format). Only agents write such lines, since every line that a rank has printed has a
prefix (`kdist_trainer.agent.logs`). Other output comes as it was written: unfinished lines,
carriage returns of progress bars, bytes that are not text, text that looks like an event.

As text, an event is a sentence, or one line for people and for grep:

    2026-01-31T12:00:01Z node-0 first-step            step 1 done, the first of this generation

A line shows the time, the node, the event's name, and the sentence. The columns and the names of
events are stable, the sentences may change. Text that a rank printed has the prefix `[rank3]: `,
other printed text the prefix `[node-0] `. Kubernetes' own events (`kdist events`) are not meant
here, and fetching the logs of pods is `kdist.job.cluster`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kdist.terminal import keep_colors
from kdist.units import count, is_number, number, of_total, rate, seconds, size
from kdist_trainer.formats import older_log
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object

Event = Mapping[str, Any]
"""Fields of an event: `event`, its name, and others such as `time`, `level`, `node` and `rank`."""

_EVENT_START = '{"time"'


class ParsedLine(NamedTuple):
    """A line of a log: what was printed, or an event.

    Attributes:
        printed: the print, without what a progress bar has overwritten; empty for an event.
        event: the event that the line is; None if it is a print.
        is_progress_bar: whether the print is a state of a progress bar, which the next one
            replaces.
    """

    printed: str
    event: Event | None
    is_progress_bar: bool


def split_line(line: str) -> ParsedLine:
    """What a line is, given without its newline."""
    event = _decode(line) if line.startswith(_EVENT_START) else None
    printed = line if event is None else ""
    visible = printed.rstrip("\r").rsplit("\r", 1)[-1]
    return ParsedLine(visible, event, is_progress_bar=printed.endswith("\r"))


def parse(line: str) -> Event | None:
    """Return the event in a line; None if the line holds none."""
    return split_line(line).event


def _decode(text: str) -> Event | None:
    try:
        event = parse_object(text)
    except MalformedTextError:
        return None
    return event if isinstance(event.get("event"), str) else None


# Bytes per read, so that a flood of prints cannot hold up the loop that reads.
_MAX_READ = 1 << 17
_MAX_LINE = 1 << 16
RANK_PREFIX = re.compile(r"(\[rank(\d{1,9})\]:) ?")
"""Precedes what a rank prints."""
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
        rank = RANK_PREFIX.match(self.text)
        return rank[1] if rank else f"[{self.node}]"

    @property
    def rank(self) -> object:
        """The rank that the event is about, or that has printed the text; None for none."""
        if self.event:
            return self.event.get("rank")
        prefix = RANK_PREFIX.match(self.text)
        return int(prefix[2]) if prefix else None

    @property
    def body(self) -> str:
        rank = RANK_PREFIX.match(self.text)
        return self.text[rank.end() :] if rank else self.text


class LogTail:
    """Follows one log file, from its present end or, with `from_start`, from its first line. `read`
    never blocks; `behind` tells whether the last one left data for the next.
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
        self._older = older_log(path)
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
            self._last_growth = self._clock()
            *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
            for line in lines:
                yield from self._entries(line)
            if not last and len(chunk) == _MAX_READ:
                self.behind = True
                return
        if self._unfinished and (
            last
            or self._clock() - self._last_growth > _UNFINISHED_LINE_TIMEOUT
            or len(self._unfinished) > _MAX_LINE
        ):
            line, self._unfinished = self._unfinished, b""
            yield from self._entries(line)

    def _read_chunk(self) -> bytes:
        try:
            with self._path.open("rb") as log:
                current = os.fstat(log.fileno()).st_ino
                # A file that was replaced is read to its end before the one in its place. In this
                # order: the agent may replace it between the two looks.
                if self._file not in (0, current):
                    if chunk := self._read_older():
                        return chunk
                    self._offset = 0
                self._file = current
                return self._read_on(log)
        except FileNotFoundError:  # the agent is replacing it
            return self._read_older()

    def _read_older(self) -> bytes:
        """Read on in the file that was replaced; empty at its end, or if it is gone."""
        with suppress(FileNotFoundError), self._older.open("rb") as log:
            if os.fstat(log.fileno()).st_ino == self._file:
                return self._read_on(log)
        return b""

    def _read_on(self, log: BinaryIO) -> bytes:
        log.seek(self._offset)
        chunk = log.read(_MAX_READ)
        self._offset += len(chunk)
        return chunk

    def _entries(self, line: bytes) -> Iterator[Entry]:
        printed, event, is_progress_bar = split_line(line.decode(errors="replace"))
        if printed.strip() or event is None:
            yield Entry(self.node, None, printed, is_progress_bar)
        if event is not None:
            yield Entry(self.node, event, "")


def read_files(files: Mapping[str, Path], *, tail: int | None = None) -> Iterator[Entry]:
    """Yield the entries of whole log files, or the last `tail` of each, in the order of their
    times.
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
    """Yield each entry with its time as sortable text; a print has that of the event before it."""
    time = ""
    for entry in entries:
        time = str((entry.event or {}).get("time", time))
        yield time, entry


# Other events are shown only for rank 0, which logs them for all ranks.
_SHOWN_FOR_EVERY_RANK = {"worker-failed", "hang", "failed", "checkpoint-failed"}
# The live view reflects these; as lines they would only be noise.
_NEVER_SHOWN = {"worker-started", "rendezvous-started", "bench-pairs"}
_ENVELOPE = {"time", "event", "level", "job", "node", "rank", "generation", "message"}


def _rendezvous_completed(e: Event) -> str:
    nodes = f" on {count(e['nodes'], 'node')}" if "nodes" in e else ""
    nodes += f" ({e['devices']})" if e.get("devices") else ""
    return (
        f"{count(e['world_size'], 'rank')}{nodes}, generation {e['generation']} "
        f"({e.get('reason', 'start')})"
    )


def _progress(e: Event) -> str:
    target = f"/{e['target']}" if e.get("target") else ""
    text = f"step {e['step']}{target}"
    if "loss" in e:
        text += f", loss {number(e['loss'])}"
    if is_number(e.get("samples_per_second")):
        text += f", {number(round(e['samples_per_second']))} samples/s"
    if is_number(e.get("learning_rate")):
        text += f", learning rate {number(e['learning_rate'], 3)}"
    return text


def _committed(e: Event) -> str:
    waited = ""
    if "visible_seconds" in e:
        waited = f", the training waited {seconds(e['visible_seconds'])}"
    amount = f" ({size(e['bytes'])})" if "bytes" in e else ""
    return f"step {e['step']} committed in {seconds(e['seconds'])}{waited}{amount}"


def _save_interval(e: Event) -> str:
    return (
        f"saves every {seconds(e['seconds'])}: a save costs {seconds(e['cost_seconds'])} of "
        f"training, and losses that go back to a checkpoint are "
        f"{seconds(e['between_losses_seconds'])} apart"
    )


def _worker_failed(e: Event) -> str:
    if e.get("primary") is False:
        return f"rank {e.get('rank')} lost its peers ({e['cause']})"
    if e.get("signal"):
        return f"rank {e.get('rank')} ended by {e['signal']} ({e['cause']})"
    code = f" with code {e['code']}" if e.get("code") is not None else ""
    return f"rank {e.get('rank')} ended{code} ({e['cause']}){_first_line(e)}"


def _first_line(e: Event) -> str:
    """Return the first line of the message, after a colon; messages may be long C++ errors."""
    line = str(e.get("message") or "").partition("\n")[0]
    return f": {line[:200]}" if line else ""


def _data_fetch(e: Event) -> str:
    amount = f", {of_total(e['bytes'], None)}" if is_number(e.get("bytes")) else ""
    cached = e.get("cached_bytes") or 0
    there = f", of which {of_total(cached, None)} are here" if cached else ""
    return f"fetches {e['url']}: {count(e['files'], 'file')}{amount}{there}"


def _fetched(e: Event, done: float, total: float | None) -> str:
    speed = e.get("bytes_per_second")
    return of_total(done, total) + (f", {rate(speed)}" if speed else "")


def _first_of(text: object) -> str:
    return str(text).partition("\n")[0][:200]


def _metrics(e: Event) -> str:
    metrics = e.get("metrics")
    if not isinstance(metrics, Mapping):
        metrics = {name: value for name, value in e.items() if name not in _ENVELOPE | {"step"}}
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items()) or "evaluated"


def _bench_row(e: Event) -> str:
    amount = f"{size(e['size'])}: bus bandwidth {rate(e['busbw'])}, " if e["size"] else ""
    wrong = f", {e['wrong']} WRONG" if e["wrong"] else ""
    return (
        f"{amount}mean {seconds(e['mean'])}, p99 {seconds(e['p99'])}, {e['rounds']} rounds{wrong}"
    )


def _bench_slow(e: Event) -> str:
    first, *others = e["ranks"]
    ranks = f"ranks {first} and {others[0]}" if others else f"rank {first}"
    return (
        f"slow: {ranks} ({', '.join(e['nodes'])}), {seconds(e['seconds'])} for a message, "
        f"{e['ratio']:.1f} times the others"
    )


SENTENCES: dict[str, Callable[[Event], str]] = {
    **dict.fromkeys(
        (
            *("compile-cache", "data-waiting", "data-stopped", "log-rotated", "observer-failed"),
            *("restarts-off", "separate-ranks", "save-waits", "storage-unavailable"),
            *("replicas-differ", "past-end", "rank-parts-changed", "settings-edited"),
            *("packages-failed", "packages-installed", "preload-off"),
        ),
        lambda e: str(e["message"]),
    ),
    "bench-begun": lambda e: (
        f"{e['collective']} among {count(e['ranks'], 'rank')} ({e['device']}, {e['backend']})"
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
    "agent-ended": lambda e: f"agent ended {_exit_status(e['code'])}",
    "agent-restarting": lambda e: (
        f"agent ended {_exit_status(e['code'])}; starts again in {seconds(e['seconds'])}"
    ),
    "agent-killed": lambda e: f"agent and ranks killed: {e['reason']}",
    "rendezvous-completed": _rendezvous_completed,
    "training-started": lambda _: "no checkpoint: starts from the beginning",
    "resumed": lambda e: (
        f"resumed after step {e['step']}"
        + (f", {number(e['samples_seen'])} samples seen" if "samples_seen" in e else "")
    ),
    "continued": lambda e: (
        f"continues after step {e['step']} with the state that rank {e['source_rank']} has kept"
    ),
    "worker-prepared": lambda e: (
        f"pid {e['pid']} is ready to join the group after {seconds(e['seconds'])}"
    ),
    "data-fetch": _data_fetch,
    "data-progress": lambda e: _fetched(e, e["done_bytes"], e.get("total_bytes")),
    "data-retry": lambda e: f"tries again in {seconds(e['seconds'])}: {_first_of(e['reason'])}",
    "data-ready": lambda e: (
        f"{count(e['files'], 'file')}, {of_total(e['bytes'], None)}, in {e['folder']}"
    ),
    "data-failed": lambda e: str(e["reason"]),
    "node-excluded": lambda e: f"does not join: {e['message']}",
    "node-standby": lambda _: (
        "the group has all its nodes; this one stands by for one that is lost"
    ),
    "rank-renewed": lambda e: (
        f"replaces the process of local rank {e['local_rank']}, pid {e['pid']}: collectives still "
        "wait in too many groups that it has left; another rank has its state"
    ),
    "saving-kept-state": lambda e: (
        f"saves step {e['step']}, which no checkpoint has, before this node ends"
    ),
    "first-step": lambda e: f"step {e['step']} done, the first of this generation",
    "progress": _progress,
    "checkpoint-committed": _committed,
    "save-interval": _save_interval,
    "checkpoint-failed": lambda e: (
        f"a checkpoint could not be saved ({e['cause']}): {e.get('error', '')}; the "
        "training continues"
    ),
    "checkpoint-fallback": lambda e: (
        f"a checkpoint is damaged, loaded the one before: step {e['step']} ({e['reason']})"
    ),
    "worker-failed": _worker_failed,
    "restarting": lambda e: (
        f"starts again, restart {e['restarts']}"
        + (
            f" of {e['budget']}"
            if e.get("budget") is not None
            else ", not counted (spec.restart.rules)"
        )
        + (" after machine faults" if e.get("counted") == "machines" else "")
        + f" ({e['cause']}){_first_line(e)}"
    ),
    "checkpoints-opened": lambda e: (
        "the script has opened its checkpoints: it is started again from the newest one, "
        f"up to {e['limit']} times without progress"
    ),
    "joining": lambda e: (
        f"{count(e['waiting'], 'node')} waiting to join: saves, then forms the larger group"
    ),
    "stopping": lambda e: (
        f"{'stops' if e.get('saves') is False else 'saves and stops'} ({e['reason']})"
    ),
    "stopped": lambda e: f"stopped after step {e['step']}, state saved",
    "evaluated": _metrics,
    "evaluation-left": lambda e: (
        f"leaves the evaluation of step {e['step']}, to stop; it is done again on resume"
    ),
    "done": lambda e: f"done after step {e['step']}",
    "hang": lambda e: (
        f"rank {e['rank']} hangs in {e['phase']}"
        + (f", inside {e['collective']}" if e.get("collective") else "")
    ),
    "failed": lambda e: f"failed: {e['cause']}{_first_line(e)}",
    "job-edited": lambda e: f"the job was edited since its checkpoint: {e['message']}",
    "loss-not-finite": lambda e: f"the loss of step {e['step']} is {e['loss']}: {e['message']}",
    "not-reproducible": lambda e: f"the resume is correct but not bitwise identical: {e['why']}",
}


def _exit_status(code: object) -> str:
    return f"by signal {-code}" if isinstance(code, int) and code < 0 else f"with code {code}"


def describe_event(event: Event) -> str:
    """Describe an event in a sentence, or if it has none or lacks fields, by its message and
    fields.
    """
    sentence = SENTENCES.get(event["event"])
    if sentence:
        try:
            return sentence(event)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            pass
    fields = [
        f"{name}={encode_json(value, ensure_ascii=False)}"
        for name, value in event.items()
        if name not in _ENVELOPE
    ]
    return " ".join([*([str(event["message"])] if event.get("message") else []), *fields])


class EventFilter:
    """Selects the events that become lines.

    Args:
        lines_only: whether lines are all there is. A live view shows progress and waiting itself.
        clock: monotonic seconds.
    """

    def __init__(self, *, lines_only: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines_only = lines_only
        self._clock = clock
        self._started_at = clock()
        self._next_progress = 0.0
        self._last_shown: dict[str, str] = {}

    def should_show(self, event: Event) -> bool:
        """Whether the event becomes a line.

        Of events that several agents or ranks log with the same content, only the first is shown.
        """
        name = event["event"]
        if name in _NEVER_SHOWN or (
            event.get("rank") not in (None, 0) and name not in _SHOWN_FOR_EVERY_RANK
        ):
            return False
        if name in ("progress", "waiting", "data-progress"):
            return self._lines_only and (name == "waiting" or self._progress_due())
        if name.startswith("agent-"):
            return True
        content = f"{event.get('generation')} {describe_event(event)}"
        if self._last_shown.get(name) == content:
            return False
        self._last_shown[name] = content
        return True

    def _progress_due(self) -> bool:
        """Whether progress is due: every 2 s in the first minute, then every 10 s, and every 60 s
        after ten minutes.
        """
        now = self._clock()
        if now < self._next_progress:
            return False
        age = now - self._started_at
        self._next_progress = now + (2 if age < 60 else 10 if age < 600 else 60)
        return True


def format_line(entry: Entry) -> str:
    """Format an entry as one line with stable columns. A print keeps its colours."""
    if entry.event is None:
        return f"{entry.prefix} {keep_colors(entry.body)}"
    stamp = entry.event.get("time")
    if not isinstance(stamp, str) or len(stamp) < 19:
        stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}"
    name, sentence = entry.event["event"], describe_event(entry.event)
    return f"{stamp[:19]}Z {entry.node} {name:<21} {sentence}".rstrip()

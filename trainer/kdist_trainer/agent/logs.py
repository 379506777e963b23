r"""The log of a node: the output of its workers and the events of its agent, relayed to the agent's
own output, and its end kept next to the checkpoints, where it outlives the pod.

Each line of a rank has its prefix, such as `[rank3]: text`, as torch prefixes the lines of a rank's
traceback. The states of a progress bar, which it overwrites with `\r`, become lines from time to
time, and its last state always does. Only the agent writes lines without a prefix, which are
events: its own, and those of ranks, which come through pipes of their own, so that nothing that a
training prints is taken for an event. Neither the workers nor the agent wait for the reader of the
log: a thread writes, and beyond a limit lines are dropped.

The kept log is a folder of segments, each of one generation of the worker group: once they hold
more than the job says, the oldest go. Another thread writes them, so that a slow or broken volume
delays nothing; lines that come while it is far behind are dropped, and the log says so. The values
of the variables that the job takes from Secrets are replaced before anything is written, also where
an event has them as JSON.

`LogFile` is the file to which `kdist run` redirects an agent: once it is long, it becomes the older
of two files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kdist_trainer import log
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.manifest import LOGS, LogSegment, list_segments
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import count_bytes
from kdist_trainer.formats import LIVE_VIEW, LOG_FILE, older_log, prefix_rank
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object
from kdist_trainer.ipc.output import EARLY, EVENTS, STREAMS, pipe_path
from kdist_trainer.object_store.files import GrowingObject
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.processes.threads import OnError, start_thread

LIMIT_VARIABLE: Final = "KDIST_LOG_LIMIT"
"""The variable with the most bytes of each of the two files, such as `1Gi`."""
DEFAULT_LIMIT: Final = "256Mi"
_STREAMS = (1, 2)


class LogFile:
    """The file, written through standard output and standard error of this process."""

    def __init__(self, path: Path, limit: int) -> None:
        """Write to `path`, until it has `limit` bytes."""
        self._path = path
        self._limit = limit

    @classmethod
    def from_environment(cls) -> LogFile | None:
        """The file that the environment names; None if the log is no file of `kdist run`."""
        path = os.environ.get(LOG_FILE)
        if not path:
            return None
        try:
            limit = count_bytes(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT))
        except (KeyError, ValueError):
            limit = count_bytes(DEFAULT_LIMIT)
        return cls(Path(path), limit)

    def rotate_if_long(self) -> None:
        """Begin another file if this one has reached its limit; called between two lines. An
        `OSError` leaves the file as it is.
        """
        with suppress(OSError):
            found = os.fstat(_STREAMS[0])
            if not stat.S_ISREG(found.st_mode) or found.st_size < self._limit:
                return
            self._path.replace(older_log(self._path))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            fresh = os.open(self._path, flags, 0o600)
            for stream in _STREAMS:
                os.dup2(fresh, stream)
            os.close(fresh)
            message = (
                f"the log has reached {self._limit:,} bytes: {self._path.name}.1 has what came "
                f"before, older lines are removed; {LIMIT_VARIABLE} sets the size of each file"
            )
            fields = {"message": message}
            os.write(
                _STREAMS[1], log.render("warning", "log-rotated", fields, now=datetime.now(UTC))
            )


LOG_SECONDS, LIVE_SECONDS = 5.0, 0.4
"""The interval of the states of a progress bar: in a log, and in a live view that redraws them."""
_UNFINISHED_SECONDS = 1.0  # how long an incomplete line waits for its end
_BELOW_SECONDS = 0.1  # after which a bar that ended its line did not do so to draw the bar below it
_LONGEST_LINE = 1 << 16
NO_RANK = b"[worker]: "
"""The prefix of the output of a worker that has no rank yet: no line is without a prefix."""
_UP = b"\x1b[A"
END_OF_STATE = b"\r\n"
"""By which a live view recognizes the states of a progress bar."""
_CONTROL = re.compile(rb"(\n|\r|\x1b\[A)")
_INVISIBLE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]|\s")


class RankLines:
    r"""Splits one stream into lines. `live` ends the states of a progress bar by `\r\n`, by which
    the live view recognizes them.
    """

    def __init__(self, *, live: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._end_of_state = END_OF_STATE if live else b"\n"
        self._interval = LIVE_SECONDS if live else LOG_SECONDS
        self._clock = clock
        self._prefix = NO_RANK
        self._row = b""
        self._drawn = False  # whether the row was begun by \r, as bars are
        # the row, and whether it was drawn, before a \r that may be the half of a \r\n
        self._returned: tuple[bytes, bool] | None = None
        self._grown_at = 0.0
        # rows of bars that may go on, and when they were left
        self._above: list[tuple[bytes, float]] = []
        self._is_back = False  # whether the row is an older state, back from a bar below it
        self._state = b""  # a bar's state that was drawn over and is not shown yet
        self._shown = b""
        self._shown_at = float("-inf")

    def begin(self, rank: int, *, generation: int = 0) -> None:  # noqa: ARG002 - as for events
        """Prefix the following output with this rank."""
        self._prefix = prefix_rank(rank).encode()

    def feed(self, data: bytes) -> list[bytes]:
        """Add output; returns the lines that are complete now, and those that are due."""
        self._grown_at = self._clock()
        found: list[bytes] = []
        if self._drawn or self._above or b"\r" in data or _UP in data:
            for piece in _CONTROL.split(data):
                found += self._take(piece)
        else:
            *lines, self._row = (self._row + data).split(b"\n")
            found += [marked for line in lines for marked in self._prefixed(line)]
        while len(self._row) > _LONGEST_LINE:
            found += self._prefixed(self._row[:_LONGEST_LINE])
            self._row = self._row[_LONGEST_LINE:]
        return found + self.due()

    def due(self) -> list[bytes]:
        """The lines that have waited long enough."""
        now, found = self._clock(), []
        while self._above and now >= self._above[0][1] + _BELOW_SECONDS:
            found += self._finish_row(self._above.pop(0)[0])
        if self._row and not self._drawn and now >= self._grown_at + _UNFINISHED_SECONDS:
            found += self._prefixed(self._row)
            self._row = b""
        state = self._newest_state()
        if state and now >= self._shown_at + self._interval:
            found.append(self._prefix + state + self._end_of_state)
            self._state, self._shown, self._shown_at = b"", state, now
        return found

    def wait_seconds(self) -> float | None:
        """The time until a line is due; None if nothing waits."""
        times = [left_at + _BELOW_SECONDS for _, left_at in self._above[:1]]
        if self._row and not self._drawn:
            times.append(self._grown_at + _UNFINISHED_SECONDS)
        if self._newest_state():
            times.append(self._shown_at + self._interval)
        return max(0.0, min(times) - self._clock()) if times else None

    def finish(self) -> list[bytes]:
        """All remaining lines, at the end of the stream."""
        rows = [*(row for row, _ in self._above), self._row or self._state]
        self._above, self._row, self._drawn, self._state = [], b"", False, b""
        return [line for row in rows for line in self._finish_row(row)]

    def _newest_state(self) -> bytes:
        is_row = self._drawn and not self._is_back and _is_visible(self._row)
        state = self._row if is_row else self._state
        return b"" if state == self._shown else state

    def _take(self, piece: bytes) -> list[bytes]:
        if piece == b"\n":
            if self._returned is not None:
                (self._row, self._drawn), self._returned = self._returned, None
            return self._end_row()
        if piece and not (piece == b"\r" and not self._row and self._returned):
            self._returned = (self._row, self._drawn) if piece == b"\r" else None
        if piece in (b"\r", _UP):
            if _is_visible(self._row) and not self._is_back:
                self._state = self._row
            self._is_back = piece == _UP and bool(self._above)
            self._row = self._above.pop()[0] if self._is_back else b""
            self._drawn = True
        elif piece:
            self._row += piece
            self._is_back = False
        return []

    def _end_row(self) -> list[bytes]:
        row, drawn, self._row, self._drawn = self._row, self._drawn, b"", False
        if not (drawn or self._above) or (not drawn and _is_visible(row)):
            above, self._above = self._above, []
            left = [line for text, _ in above for line in self._finish_row(text)]
            is_shown, self._state, self._shown = row and row == self._shown, b"", b""
            return left if is_shown else [*left, *self._prefixed(row)]
        if not self._is_back:
            self._state = b""
        self._above.append((row, self._clock()))
        return []

    def _finish_row(self, row: bytes) -> list[bytes]:
        """The last state of a bar as a line; no line for a bar that was erased."""
        if not _is_visible(row):
            return []
        self._state = b""
        return self._prefixed(row)

    def _prefixed(self, text: bytes) -> list[bytes]:
        """The text as a line with the prefix of its rank, which torch's own tracebacks have
        already.
        """
        text = text.removesuffix(b"\r")
        prefix = b"" if text.startswith(self._prefix) else self._prefix
        return [prefix + text + b"\n"]


def _is_visible(text: bytes) -> bool:
    return bool(_INVISIBLE.sub(b"", text))


NAMES: Final = frozenset(
    {
        "accelerate-config-unused",
        "attributes-not-kept",
        "bench-begun",
        "bench-done",
        "bench-pairs",
        "bench-row",
        "bench-slow",
        "buffers-late",
        "checkpoint-committed",
        "checkpoint-failed",
        "checkpoint-fallback",
        "checkpoints-off",
        "continued",
        "control-unreachable",
        "data-parallel",
        "done",
        "early-stop",
        "evaluated",
        "evaluation-left",
        "first-step",
        "job-edited",
        "ledger-write-failed",
        "loss-not-finite",
        "not-reproducible",
        "observer-failed",
        "past-end",
        "preflight",
        "pretrained-loaded",
        "pretrained-mismatch",
        "profile",
        "profile-failed",
        "progress",
        "rank-parts-changed",
        "recovery-restarts",
        "replicas-differ",
        "resumed",
        "rolled-back",
        "save-interval",
        "save-waits",
        "settings-edited",
        "step-skipped",
        "stopped",
        "storage-not-shared",
        "storage-unavailable",
        "store-unbound",
        "tensorboard-missing",
        "tensorboard-not-written",
        "thread-failed",
        "timing-ended",
        "timing-failed",
        "tracker-params-kept",
        "tracker-unnamed",
        "training-started",
    }
)
"""The events that ranks log; all others are the agent's."""
_MAX_DEPTH = 20
_LEVELS = ("info", "warning", "error")


class RankEvents:
    """Splits the stream of one rank's events into lines for the log."""

    def __init__(self) -> None:
        self._prefix = NO_RANK
        self._known: dict[str, int] = {}
        self._rest = b""

    def begin(self, rank: int, *, generation: int) -> None:
        """The following events are of this rank and generation."""
        self._prefix = prefix_rank(rank).encode()
        self._known = {"rank": rank, "generation": generation}

    def feed(self, data: bytes) -> list[bytes]:
        """Add what the rank has written; returns the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > log.MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [self._to_line(line) for line in lines]

    def finish(self) -> list[bytes]:
        """What is left at the end of the rank."""
        rest, self._rest = self._rest, b""
        return [self._to_line(rest)] if rest else []

    def _to_line(self, text: bytes) -> bytes:
        try:
            event = parse_object(text, max_bytes=log.MAX_LINE, max_depth=_MAX_DEPTH)
        except MalformedTextError:
            event = {}
        if (
            str(event.get("event")) not in NAMES
            or str(event.get("level")) not in _LEVELS
            or not isinstance(event.get("time"), str)
        ):
            return self._prefix + text + b"\n"
        return log.encode({**event, **log.bound_fields(), **self._known})


_SEGMENTS = 8
"""Parts of the limit, of which one goes at a time."""
_OBJECT_BYTES = 1 << 20  # of a segment in an object store, which is written again as it grows
_MOST_WAITING = 1 << 22  # bytes
_RETRY_SECONDS = 10.0  # after an error of the disk
_CLOSE_SECONDS = 2.0  # how long the end of the agent waits for a slow disk
_SHORTEST_SECRET = 4  # bytes; shorter ones would be found in every other line
_HIDDEN = b"***"


class _SegmentFile:
    """A segment in a file: what is appended is there at once."""

    seconds_to_flush = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = 0

    def write(self, data: bytes) -> int:
        """Append bytes. Returns how many were written. Raises `OSError`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, storage.FILE_MODE)
        try:
            count = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        self.size += count
        return count

    def flush(self) -> None:
        """Nothing to do."""


class KeptLog:
    """The segments of one node's log, of `max_bytes` together at most, without the `secrets`.
    `node` names this node's folder, the same for every pod that takes the node's place.
    """

    def __init__(
        self,
        checkpoints: StoragePath,
        node: str,
        *,
        max_bytes: int,
        secrets: Collection[bytes] = (),
    ) -> None:
        self._folder = checkpoints / LOGS / node
        self._segment_bytes = max(1, max_bytes // _SEGMENTS)
        if isinstance(self._folder, ObjectPath):
            self._segment_bytes = min(self._segment_bytes, _OBJECT_BYTES)
        self._most_segments = max(_SEGMENTS, max_bytes // self._segment_bytes)
        # a pattern of the secrets' lines, the longest first: one may be part of another
        lines = {line.strip() for secret in secrets for line in secret.splitlines()}
        long = {line for line in lines if len(line) >= _SHORTEST_SECRET}
        long |= {encode_json(os.fsdecode(line))[1:-1].encode() for line in long}
        forms = sorted(long, key=len, reverse=True)
        self._hide = re.compile(b"|".join(map(re.escape, forms))) if forms else None
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = self._dropped = self._generation = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._segment: _SegmentFile | GrowingObject | None = None
        self._segment_generation = 0
        self._resume_at = 0.0
        self._thread = start_thread(self._run, name="kept-log", on_error=OnError.RESTART)

    def put(self, data: bytes) -> None:
        """Take whole lines; dropped while too much waits."""
        if not data:
            return
        with self._changed:
            if self._bytes > _MOST_WAITING:
                self._dropped += data.count(b"\n")
                return
            if self._dropped:
                notice = f"… {self._dropped} lines are left out: the disk was too slow\n"
                data = notice.encode() + data
                self._dropped = 0
            self._waiting.append((self._generation, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def begin(self, generation: int) -> None:
        """What follows belongs to this generation."""
        with self._changed:
            self._generation = generation

    def close(self) -> None:
        """Write what is left, unless the disk takes too long."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._is_closed, self._seconds_to_flush()
                )
                is_last = self._is_closed and not self._waiting
                generation, data = self._waiting.popleft() if self._waiting else (0, b"")
            try:
                if data:
                    self._keep(generation, data)
                if is_last or self._seconds_to_flush() == 0:
                    try:  # after an error the segment is tried again later
                        if self._segment is not None:
                            self._segment.flush()
                    except OSError as error:
                        self._warn(error)
            finally:
                with self._changed:
                    self._bytes -= len(data)
            if is_last:
                return

    def _seconds_to_flush(self) -> float | None:
        """How long what is appended may still wait to be written; None if all is."""
        return None if self._segment is None else self._segment.seconds_to_flush

    def _keep(self, generation: int, data: bytes) -> None:
        if time.monotonic() < self._resume_at:
            return
        try:
            segment = self._segment
            is_other = segment is None or self._segment_generation != generation
            if segment is None or is_other or segment.size >= self._segment_bytes:
                if segment is not None:
                    segment.flush()
                segment = self._open_next(generation)
            segment.write(self._hide.sub(_HIDDEN, data) if self._hide else data)
            self._segment, self._segment_generation = segment, generation
        except OSError as error:
            self._segment = None
            self._resume_at = time.monotonic() + _RETRY_SECONDS
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        message = f"the log of this node cannot be kept in {self._folder}: {error}"
        log.warn("log-not-kept", error=str(error), message=message)

    def _open_next(self, generation: int) -> _SegmentFile | GrowingObject:
        """The segment to write to from now on; the oldest go, of which there are too many."""
        storage.make_folder(self._folder, durable=True)
        known = list(list_segments(self._folder))
        numbers = [each.number for each in known if each.generation == generation]
        while len(known) >= self._most_segments:
            with suppress(FileNotFoundError):
                storage.remove(self._folder / known.pop(0).name)
        path = self._folder / LogSegment(generation, max(numbers, default=0) + 1).name
        return GrowingObject(path) if isinstance(path, ObjectPath) else _SegmentFile(path)


def place_of(node: str) -> str:
    """The name of a node without the random suffix of a pod's name: the pod that takes the place of
    `digits-0-x7k2p` continues its log.
    """
    return re.sub(r"(-\d+)-[a-z0-9]{5}$", r"\1", node)


def read_secrets(names: Collection[str], environment: Mapping[str, str]) -> list[bytes]:
    """The values of these variables."""
    return [os.fsencode(environment[name]) for name in names if name in environment]


LIMIT = 1 << 24
"""The most bytes that wait for the reader of the log."""
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MAX_READS = 16  # reads of all pipes in a row, so that much output does not block the agent
# between two reads, so that a rank that prints a lot does not wake the agent for each line
_GATHER_SECONDS = 0.02
_DRAIN_SECONDS = 2.0  # how long the reader of the log may stall when the agent exits


@dataclass(frozen=True)
class _Stream:
    local_rank: int | str
    output: int  # where its lines go: standard output or standard error
    lines: RankLines | RankEvents


class LogRelay:
    """Relays the output of the workers of one node, from its creation to `close`."""

    def __init__(
        self, scratch: Path, *, ranks: int, live: bool | None = None, copy: KeptLog | None = None
    ) -> None:
        """Create the pipes in `scratch`, replacing those of an earlier agent. `live` says whether a
        live view reads the log; by default, whether `LIVE_VIEW` is set. `copy` receives everything
        that is written; closed with the relay. Raises `OSError` if a pipe cannot be created.
        """
        live = LIVE_VIEW in os.environ if live is None else live
        self._streams: dict[int, _Stream] = {}  # by the descriptor of its pipe
        for local_rank in (*range(ranks), EARLY):
            for number in (*STREAMS, EVENTS):
                path = pipe_path(scratch, local_rank, number)
                path.unlink(missing_ok=True)
                os.mkfifo(path, 0o600)
                # it always has a writer, so that it never reaches end of file
                descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                if hasattr(fcntl, "F_SETPIPE_SZ"):
                    with suppress(OSError):  # above this user's limit
                        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                lines = RankEvents() if number == EVENTS else RankLines(live=live)
                self._streams[descriptor] = _Stream(local_rank, min(number, STREAMS[1]), lines)
        self._lock = threading.Lock()
        self._copy = copy
        self._log = _Log(copy)
        self._closing = False
        self._wake_read, self._wake = os.pipe()
        self._thread = start_thread(self._pump, name="relay", on_error=OnError.RESTART)
        log.write_to(self.write)

    def begin(self, global_ranks: list[int], *, generation: int = 0) -> None:
        """Set the global ranks of the workers that start now, by local rank, and their
        generation.
        """
        with self._lock:
            self._read()
            for each in self._streams.values():
                self._log.put(each.output, each.lines.finish())
                if isinstance(each.local_rank, int):
                    each.lines.begin(global_ranks[each.local_rank], generation=generation)
            if self._copy is not None:
                self._copy.begin(generation)

    def write(self, line: bytes) -> None:
        """Write an event of the agent after all that the workers have printed so far."""
        with self._lock:
            self._read()
            self._log.put(STREAMS[1], [line])

    def close(self) -> None:
        """Write the remaining lines, unless the reader stalls; later events bypass the relay."""
        log.write_to(None)
        self._closing = True
        os.write(self._wake, b"\0")
        self._thread.join()
        with self._lock:
            self._read()
            for each in self._streams.values():
                self._log.put(each.output, each.lines.finish())
        self._log.close()
        if self._copy is not None:
            self._copy.close()
        for descriptor in (*self._streams, self._wake_read, self._wake):
            os.close(descriptor)

    def _pump(self) -> None:
        poller = select.poll()
        for descriptor in (*self._streams, self._wake_read):
            poller.register(descriptor, select.POLLIN)
        while not self._closing:
            with self._lock:
                flooded = self._read()
                lines = [each.lines for each in self._streams.values()]
                waits = [each.wait_seconds() for each in lines if isinstance(each, RankLines)]
            wait = min((each for each in waits if each is not None), default=None)
            if not flooded:
                time.sleep(_GATHER_SECONDS)
                poller.poll(None if wait is None else wait * 1000 + 1)

    def _read(self) -> bool:
        """Read from the pipes; returns whether they contain more than was read."""
        waiting = list(self._streams)
        for _ in range(_MAX_READS):
            waiting = [descriptor for descriptor in waiting if self._read_one(descriptor)]
            if not waiting:
                break
        for each in self._streams.values():
            if isinstance(each.lines, RankLines):
                self._log.put(each.output, each.lines.due())
        return bool(waiting)

    def _read_one(self, descriptor: int) -> bool:
        """Read from one pipe; returns whether it may contain more."""
        each = self._streams[descriptor]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        try:
            lines = each.lines.feed(data)
        except Exception as error:  # noqa: BLE001 - what a rank writes ends no thread
            self._report(error)
            return len(data) == _READ_BYTES
        self._log.put(each.output, lines)
        return len(data) == _READ_BYTES

    def _report(self, error: Exception) -> None:
        """Log an error of this relay, whose own events would wait for it."""
        message = f"output of a rank is lost: {type(error).__name__}: {error}"
        line = log.render("error", "log-relay-failed", {"message": message}, now=datetime.now(UTC))
        self._log.put(STREAMS[1], [line])


class _Log:
    """A queue of lines that a thread writes to standard output and standard error, where it may
    block.
    """

    def __init__(self, copy: KeptLog | None) -> None:
        self._copy = copy
        self._file = LogFile.from_environment()
        self._lines: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._written_at = time.monotonic()
        start_thread(self._write, name="log", on_error=OnError.RESTART)

    def put(self, stream: int, lines: list[bytes]) -> None:
        """Queue the lines, or drop them while more than `LIMIT` bytes wait."""
        if not lines:
            return
        if self._copy is not None:  # states of a progress bar are only for the live view
            self._copy.put(b"".join(line for line in lines if not line.endswith(END_OF_STATE)))
        with self._changed:
            if self._bytes > LIMIT:
                self._dropped += len(lines)
                return
            if self._dropped:
                notice = f"… {self._dropped} lines are left out: they were not read in time\n"
                lines = [notice.encode(), *lines]
                self._dropped = 0
            data = b"".join(lines)
            self._lines.append((stream, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all lines are written, or the reader stalls."""
        with self._changed:
            self._written_at = time.monotonic()
            while self._bytes and time.monotonic() - self._written_at < _DRAIN_SECONDS:
                self._changed.wait(0.1)

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                stream, data = self._lines.popleft()
            for start in range(0, len(data), _READ_BYTES):
                _write_whole(stream, data[start : start + _READ_BYTES])
                with self._changed:
                    self._written_at = time.monotonic()
            if self._file is not None:
                self._file.rotate_if_long()
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all of `data`; it is lost if the disk is full or the pipe is closed."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return
            select.select([], [descriptor], [])

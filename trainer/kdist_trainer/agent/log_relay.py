r"""Relays the output of this node's workers, together with the agent's own events, to the agent's
log.

Each line is prefixed with its rank, such as `[rank3]: text`, as torch prefixes the lines of a
rank's traceback; events of kdist pass unchanged. The states of a progress bar, which it overwrites
with `\r`, become lines from time to time, and its last state always does. Neither the workers nor
the agent wait for the reader of the log: a thread writes, and beyond a limit lines are dropped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kdist_trainer import log
from kdist_trainer.agent.kept_log import LogCopy, NullKeptLog
from kdist_trainer.output import STREAMS, pipe_path
from kdist_trainer.threads import OnError, start_thread

LOG_SECONDS, LIVE_SECONDS = 5.0, 0.4
"""The interval of the states of a progress bar: in a log, and in a live view that redraws them."""
_UNFINISHED_SECONDS = 1.0  # how long an incomplete line waits for its end
_BELOW_SECONDS = 0.1  # after which a bar that ended its line did not do so to draw the bar below it
_LONGEST_LINE = 1 << 16
_UP = b"\x1b[A"
_END_OF_STATE = b"\r\n"
_EVENT_START = b'{"time"'
_CONTROL = re.compile(rb"(\n|\r|\x1b\[A)")
_INVISIBLE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]|\s")


class RankLines:
    r"""Splits one stream into lines. `live` ends the states of a progress bar by `\r\n`, by which
    the live view recognizes them.
    """

    def __init__(self, *, live: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._end_of_state = _END_OF_STATE if live else b"\n"
        self._interval = LIVE_SECONDS if live else LOG_SECONDS
        self._clock = clock
        self._prefix = b""
        self._row = b""
        self._drawn = False  # whether the row was begun by \r, as bars are
        self._grown_at = 0.0
        # rows of bars that may go on, and when they were left
        self._above: list[tuple[bytes, float]] = []
        self._is_back = False  # whether the row is an older state, back from a bar below it
        self._state = b""  # a bar's state that was drawn over and is not shown yet
        self._shown = b""
        self._shown_at = float("-inf")

    def begin(self, rank: int) -> None:
        """Prefix the following output with this rank."""
        self._prefix = b"[rank%d]: " % rank

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
            return self._end_row()
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
        if _EVENT_START in row or not (drawn or self._above) or (not drawn and _is_visible(row)):
            above, self._above = self._above, []
            left = [line for text, _ in above for line in self._finish_row(text)]
            return [*left, *self._prefixed(row)]
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
        """The text as a line with the prefix of its rank. Events are unchanged, and torch's own
        tracebacks have the prefix already.
        """
        text = text.removesuffix(b"\r")
        start = text.find(_EVENT_START)
        if start >= 0 and _is_event(text[start:]):
            printed = text[:start]
            return [
                *(self._prefixed(printed) if _is_visible(printed) else []),
                text[start:] + b"\n",
            ]
        prefix = b"" if text.startswith(self._prefix) else self._prefix
        return [prefix + text + b"\n"]


def _is_visible(text: bytes) -> bool:
    return bool(_INVISIBLE.sub(b"", text))


def _is_event(text: bytes) -> bool:
    try:
        event = json.loads(text)
    except ValueError:
        return False
    return isinstance(event, dict) and isinstance(event.get("event"), str)


LIMIT = 1 << 24
"""The most bytes that wait for the reader of the log."""
LIVE = "KDIST_LIVE_VIEW"
"""The variable that `kdist run` sets for its live view: states of progress bars are then relayed
more often, and marked.
"""
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MAX_READS = 16  # reads of all pipes in a row, so that much output does not block the agent
# between two reads, so that a rank that prints a lot does not wake the agent for each line
_GATHER_SECONDS = 0.02
_DRAIN_SECONDS = 2.0  # how long the reader of the log may stall when the agent exits


class LogRelay:
    """Relays the output of the workers of one node, from its creation to `close`."""

    def __init__(
        self, scratch: Path, *, ranks: int, live: bool | None = None, copy: LogCopy | None = None
    ) -> None:
        """Create the pipes, replacing those of an earlier agent.

        Args:
            scratch: the folder of the pipes.
            ranks: the number of workers.
            live: whether a live view reads the log; by default, whether `LIVE` is set.
            copy: receives everything that is written; closed with the relay.

        Raises:
            OSError: a pipe cannot be created.
        """
        live = LIVE in os.environ if live is None else live
        # by descriptor: local rank, stream, lines
        self._streams: dict[int, tuple[int, int, RankLines]] = {}
        for local_rank in range(ranks):
            for stream in STREAMS:
                descriptor = _make_pipe(pipe_path(scratch, local_rank, stream))
                self._streams[descriptor] = local_rank, stream, RankLines(live=live)
        self._lock = threading.Lock()
        self._copy = copy or NullKeptLog()
        self._log = _Log(self._copy)
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
            for local_rank, stream, lines in self._streams.values():
                self._log.put(stream, lines.finish())
                lines.begin(global_ranks[local_rank])
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
            for _, stream, lines in self._streams.values():
                self._log.put(stream, lines.finish())
        self._log.close()
        self._copy.close()
        for descriptor in (*self._streams, self._wake_read, self._wake):
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pump(self) -> None:
        poller = select.poll()
        for descriptor in (*self._streams, self._wake_read):
            poller.register(descriptor, select.POLLIN)
        while not self._closing:
            with self._lock:
                flooded = self._read()
                wait = self._wait_seconds()
            if not flooded:
                time.sleep(_GATHER_SECONDS)
                poller.poll(None if wait is None else wait * 1000 + 1)

    def _wait_seconds(self) -> float | None:
        waits = [lines.wait_seconds() for _, _, lines in self._streams.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _read(self) -> bool:
        """Read from the pipes; returns whether they contain more than was read."""
        waiting = list(self._streams)
        for _ in range(_MAX_READS):
            waiting = [descriptor for descriptor in waiting if self._read_one(descriptor)]
            if not waiting:
                break
        for _, stream, lines in self._streams.values():
            self._log.put(stream, lines.due())
        return bool(waiting)

    def _read_one(self, descriptor: int) -> bool:
        """Read from one pipe; returns whether it may contain more."""
        _, stream, lines = self._streams[descriptor]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        self._log.put(stream, lines.feed(data))
        return len(data) == _READ_BYTES


def _make_pipe(path: Path) -> int:
    """Create a named pipe that is read without blocking. It always has a writer, so that it never
    reaches end of file.
    """
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # above this user's limit
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return descriptor


class _Log:
    """A queue of lines that a thread writes to standard output and standard error, where it may
    block.
    """

    def __init__(self, copy: LogCopy) -> None:
        self._copy = copy
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
        # states of a progress bar are only for the live view
        self._copy.put(b"".join(line for line in lines if not line.endswith(_END_OF_STATE)))
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

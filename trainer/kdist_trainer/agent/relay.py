"""Takes what the ranks of a node print from their pipes and writes it, with the agent's own events, to the agent's log.

Neither the ranks nor the agent ever wait for whoever reads that log: a thread writes, and beyond a limit lines are left out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from kdist_trainer import log
from kdist_trainer.agent.lines import RankLines
from kdist_trainer.output import STREAMS, pipe_path

LIMIT = 1 << 24
"""Bytes that wait for the log's reader."""
LIVE = "KDIST_LIVE_VIEW"
"""Set by `kdist run` where a live view draws progress bars: then their states come more often, and marked."""
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_TURNS = 16  # reads of all pipes in a row, so that a flood does not hold up the agent
_GATHER_SECONDS = 0.02  # between two looks, so that a rank that prints a lot does not wake the agent for each line
_DRAIN_SECONDS = 2.0  # that the log's reader may stand still at the agent's end


class Relay:
    """The output of one node. It works from its creation to `close`."""

    def __init__(self, scratch: Path, *, ranks: int, live: bool | None = None) -> None:
        """Make the pipes, replacing a dead predecessor's. Raises `OSError`."""
        live = LIVE in os.environ if live is None else live
        self._streams: dict[int, tuple[int, int, RankLines]] = {}  # by descriptor: local rank, stream, lines
        for local_rank in range(ranks):
            for stream in STREAMS:
                descriptor = _make_pipe(pipe_path(scratch, local_rank, stream))
                self._streams[descriptor] = local_rank, stream, RankLines(live=live)
        self._lock = threading.Lock()
        self._log = _Log()
        self._over = False
        self._wake_read, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._pump, name="relay", daemon=True)
        self._thread.start()
        log.write_to(self.write)

    def begin(self, global_ranks: list[int]) -> None:
        """The ranks that start now, by local rank."""
        with self._lock:
            self._read()
            for local_rank, stream, lines in self._streams.values():
                self._log.put(stream, lines.finish())
                lines.begin(global_ranks[local_rank])

    def write(self, line: bytes) -> None:
        """Write an event of the agent's behind all that the ranks have printed so far."""
        with self._lock:
            self._read()
            self._log.put(STREAMS[1], [line])

    def close(self) -> None:
        """Write all that is left, unless nobody reads it; what is logged later is written directly."""
        log.write_to(None)
        self._over = True
        os.write(self._wake, b"\0")
        self._thread.join()
        with self._lock:
            self._read()
            for _, stream, lines in self._streams.values():
                self._log.put(stream, lines.finish())
        self._log.close()
        for descriptor in (*self._streams, self._wake_read, self._wake):
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pump(self) -> None:
        poller = select.poll()
        for descriptor in (*self._streams, self._wake_read):
            poller.register(descriptor, select.POLLIN)
        while not self._over:
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
        """Take what is in the pipes; whether there was too much for this time."""
        waiting = list(self._streams)
        for _ in range(_TURNS):
            waiting = [descriptor for descriptor in waiting if self._read_one(descriptor)]
            if not waiting:
                break
        for _, stream, lines in self._streams.values():
            self._log.put(stream, lines.due())
        return bool(waiting)

    def _read_one(self, descriptor: int) -> bool:
        """Whether there may be more."""
        _, stream, lines = self._streams[descriptor]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        self._log.put(stream, lines.feed(data))
        return len(data) == _READ_BYTES


def _make_pipe(path: Path) -> int:
    """A named pipe that can be read without waiting, and that has a writer at all times, so that it has no end."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # more than this user may have
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return descriptor


class _Log:
    """Lines on their way to standard output and standard error, written by a thread that may have to wait."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._left_out = 0
        self._changed = threading.Condition()
        self._written_at = time.monotonic()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def put(self, stream: int, lines: list[bytes]) -> None:
        """Take the lines, or leave them out while too much waits for the reader."""
        if not lines:
            return
        with self._changed:
            if self._bytes > LIMIT:
                self._left_out += len(lines)
                return
            if self._left_out:
                words = f"… {self._left_out} lines are left out: they were not read in time\n"
                lines, self._left_out = [words.encode(), *lines], 0
            data = b"".join(lines)
            self._lines.append((stream, data))
            self._bytes += len(data)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all is written, or the reader takes nothing any more."""
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
    """Write all of it; what a full disk or a closed pipe refuses is lost, and changes nothing else."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return
            select.select([], [descriptor], [])

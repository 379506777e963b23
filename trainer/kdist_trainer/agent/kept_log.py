"""Keeps the end of this node's log next to the checkpoints, where it outlives the pod.

A node has a folder of segments, each of one generation of the worker group: once they hold more
than the job says, the oldest go. A thread writes them, so that a slow or broken volume delays
neither the workers nor the agent; what comes while it is far behind is dropped, and said so.

The values of the variables that the job takes from Secrets are replaced before anything is written,
also where an event has them as JSON.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kdist_trainer import log
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.kept_logs import LOGS, LogSegment, list_segments
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.json_text import encode_json
from kdist_trainer.object_store.growing import GrowingObject
from kdist_trainer.object_store.path import ObjectPath
from kdist_trainer.threads import OnError, start_thread

_SEGMENTS = 8
"""Parts of the limit, of which one goes at a time."""
_OBJECT_BYTES = 1 << 20  # of a segment in an object store, which is written again as it grows
_MOST_WAITING = 1 << 22  # bytes
_RETRY_SECONDS = 10.0  # after an error of the disk
_CLOSE_SECONDS = 2.0  # how long the end of the agent waits for a slow disk
_SHORTEST_SECRET = 4  # bytes; shorter ones would be found in every other line
_HIDDEN = b"***"


class LogCopy(Protocol):
    """Receives what is written to the log of a node."""

    def put(self, data: bytes) -> None:
        """Take whole lines. Never blocks."""

    def begin(self, generation: int) -> None:
        """What follows belongs to this generation."""

    def close(self) -> None:
        """Write what is left."""


class NullKeptLog:
    """No copy: the job keeps no logs, or has no folder for them."""

    def put(self, data: bytes) -> None:
        """Forget it."""

    def begin(self, generation: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


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
    """The segments of one node's log.

    Args:
        checkpoints: The folder of the checkpoints.
        node: The name of this node's folder, the same for every pod that takes the node's place.
        max_bytes: The most bytes of all segments together.
        secrets: What must not be written.
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
        self._hide = _find_any(secrets)
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
                    self._flush()
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
            self._append(generation, self._hide.sub(_HIDDEN, data) if self._hide else data)
        except OSError as error:
            self._segment = None
            self._resume_at = time.monotonic() + _RETRY_SECONDS
            self._warn(error)

    def _append(self, generation: int, data: bytes) -> None:
        segment = self._segment
        is_other = segment is None or self._segment_generation != generation
        if segment is None or is_other or segment.size >= self._segment_bytes:
            if segment is not None:
                segment.flush()
            segment = self._open_next(generation)
        segment.write(data)
        self._segment, self._segment_generation = segment, generation

    def _flush(self) -> None:
        """Write what is not yet written; after an error the segment is tried again later."""
        try:
            if self._segment is not None:
                self._segment.flush()
        except OSError as error:
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


def _find_any(secrets: Collection[bytes]) -> re.Pattern[bytes] | None:
    """A pattern of the secrets' lines, the longest first: one may be part of another."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    long = {line for line in lines if len(line) >= _SHORTEST_SECRET}
    long |= {encode_json(os.fsdecode(line))[1:-1].encode() for line in long}
    forms = sorted(long, key=len, reverse=True)
    return re.compile(b"|".join(map(re.escape, forms))) if forms else None


def place_of(node: str) -> str:
    """The name of a node without the random suffix of a pod's name: the pod that takes the place of
    `digits-0-x7k2p` continues its log.
    """
    return re.sub(r"(-\d+)-[a-z0-9]{5}$", r"\1", node)


def read_secrets(names: Collection[str], environment: Mapping[str, str]) -> list[bytes]:
    """The values of these variables."""
    return [os.fsencode(environment[name]) for name in names if name in environment]

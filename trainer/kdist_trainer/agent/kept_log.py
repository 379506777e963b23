"""Keeps the end of this node's log next to the checkpoints, where it outlives the pod.

A node has a folder of segments, each of one generation of the worker group: once they hold more
than the job says, the oldest go. A thread writes them, so that a slow or broken volume delays
neither the workers nor the agent; what comes while it is far behind is dropped, and said so.

The values of the variables that the job takes from Secrets are replaced before anything is written,
also where an event has them as JSON.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from kdist_trainer import log
from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.kept_logs import LOGS, LogSegment, list_segments
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.object_store.path import ObjectPath

_SEGMENTS = 8
"""Parts of the limit, of which one goes at a time."""
_OBJECT_BYTES = 1 << 20  # of a segment in an object store, which is written again as it grows
_OBJECT_SECONDS = 10.0  # between two writes of it
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
        self._segments = _SEGMENTS
        self._segment_bytes = max(1, max_bytes // _SEGMENTS)
        if isinstance(self._folder, ObjectPath):
            self._segment_bytes = min(self._segment_bytes, _OBJECT_BYTES)
            self._segments = max_bytes // self._segment_bytes
        self._object = b""
        """Content of the segment in an object store, which is written as a whole."""
        self._is_written = True
        self._written_at = 0.0
        self._hide = _find_any(secrets)
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = self._dropped = self._generation = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._segment: LogSegment | None = None
        self._size = 0
        self._resume_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kept-log", daemon=True)
        self._thread.start()

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
                while not self._waiting and not self._is_closed and self._is_written:
                    self._changed.wait()
                if not self._waiting and not self._is_closed:
                    self._changed.wait(self._written_at + _OBJECT_SECONDS - time.monotonic())
                is_closed = self._is_closed and not self._waiting
                generation, data = self._waiting.popleft() if self._waiting else (-1, b"")
            if data:
                self._keep(generation, data)
            if is_closed or time.monotonic() > self._written_at + _OBJECT_SECONDS:
                self._attempt(self._write_object)
            if is_closed:
                return
            with self._changed:
                self._bytes -= len(data)

    def _keep(self, generation: int, data: bytes) -> None:
        if time.monotonic() < self._resume_at:
            return
        shown = self._hide.sub(_HIDDEN, data) if self._hide else data
        self._attempt(partial(self._write, generation, shown))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._segment, self._is_written = None, True
            self._resume_at = time.monotonic() + _RETRY_SECONDS
            message = f"the log of this node cannot be kept in {self._folder}: {error}"
            log.warn("log-not-kept", error=str(error), message=message)

    def _write(self, generation: int, data: bytes) -> None:
        segment = self._segment
        if segment is None or segment.generation != generation or self._size >= self._segment_bytes:
            self._write_object()
            segment = self._open_next(generation)
        path = self._folder / segment.name
        if isinstance(path, ObjectPath):
            self._object += data
            self._size, self._segment, self._is_written = len(self._object), segment, False
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._size += os.write(descriptor, data)
        finally:
            os.close(descriptor)
        self._segment = segment

    def _write_object(self) -> None:
        """Write the segment in an object store, if it has grown."""
        if self._is_written or self._segment is None or isinstance(self._folder, Path):
            return
        (self._folder / self._segment.name).write_bytes(self._object)
        self._is_written, self._written_at = True, time.monotonic()

    def _open_next(self, generation: int) -> LogSegment:
        """The segment to write to from now on; the oldest go, of which there are too many."""
        storage.make_folder(self._folder, durable=True)
        known = list(list_segments(self._folder))
        numbers = [each.number for each in known if each.generation == generation]
        while len(known) >= self._segments:
            with suppress(FileNotFoundError):
                storage.remove(self._folder / known.pop(0).name)
        self._size, self._object = 0, b""
        return LogSegment(generation, max(numbers, default=0) + 1)


def _find_any(secrets: Collection[bytes]) -> re.Pattern[bytes] | None:
    """A pattern of the secrets' lines, the longest first: one may be part of another."""
    lines = {line.strip() for secret in secrets for line in secret.splitlines()}
    long = {line for line in lines if len(line) >= _SHORTEST_SECRET}
    long |= {json.dumps(os.fsdecode(line))[1:-1].encode() for line in long}
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

"""The ledger of a run, next to its checkpoints: one line per step and one per event, append-only.

It outlives processes and pods: restarts are counted in it and the use of samples is audited by it.
Free of torch: the agent and the command line read and write it too. A writer may die within a line:
readers skip what is not a whole JSON object, and the next writer starts a new line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import storage

FOLDER = "ledger"
STEPS = "steps.jsonl"
EVENTS = "events.jsonl"
_TAIL_BYTES = 1 << 22


def _open_for_append(path: Path) -> int:
    """Open a ledger file and end a line that a dead writer left incomplete. Raises `OSError`."""
    storage.make_folder(path.parent, durable=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, storage.FILE_MODE)
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        os.write(handle, b"\n")
    return handle


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return _parse(data)


def _parse(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines():
        with suppress(ValueError):  # an incomplete line, or bytes that are not text
            document = json.loads(line)
            if isinstance(document, dict):
                found.append(document)
    return found


class StepLedger:
    """`steps.jsonl`, written by rank 0.

    A line has step, generation, world_size, first and last sample, loss (`float.hex`), seconds and
    wait_seconds: the part of the seconds spent waiting in all-reduces, as far as it was known when
    the line was written. The loss is null if a rank has died with its part of it before any other
    had received the mean.
    """

    def __init__(self, root: Path) -> None:
        self._handle = _open_for_append(root / FOLDER / STEPS)

    @staticmethod
    def read_tail(root: Path) -> set[tuple[int, int]]:
        """Generation and step of the newest lines."""
        try:
            with (root / FOLDER / STEPS).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = _parse(file.read())
        except OSError:
            return set()
        return {(int(line["generation"]), int(line["step"])) for line in lines if "step" in line}

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append one line per document in one write. Raises `OSError`."""
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        _write_all(self._handle, data)

    def sync(self) -> None:
        """Sync all lines to the disk, before a checkpoint of their steps is committed. Raises
        `OSError`.
        """
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; it may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class RunLedger:
    """`events.jsonl`, written by the agent of group rank 0 and by rank 0: one line per event."""

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER

    def append(self, event: str, **fields: Any) -> None:
        """Append an event with the current time (Unix seconds) in one write, and sync it. Raises
        `OSError`.
        """
        line = json.dumps(
            {"time": round(time.time(), 3), "event": event, **fields},
            separators=(",", ":"),
            default=str,
        )
        handle = _open_for_append(self.folder / EVENTS)
        try:
            _write_all(handle, line.encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first. Raises `OSError` if they exist but cannot be read."""
        return [
            one for one in _read_lines(self.folder / EVENTS) if isinstance(one.get("event"), str)
        ]

    def last_generation(self) -> int:
        """The highest recorded generation; 0 before the first."""
        numbers = (one.get("generation") for one in self.events() if one["event"] == "generation")
        return max((number for number in numbers if isinstance(number, int)), default=0)

    def read_steps(self) -> list[dict[str, Any]]:
        """All lines of `steps.jsonl`, oldest first; a step that was rolled back and repeated has
        two.
        """
        return _read_lines(self.folder / STEPS)

"""The run's diary beside its checkpoints: one line per step and one per event, appended and never
rewritten.

It outlives processes and pods, so the restart budget and the audit of samples rest on it. Free of
torch: the agent and the command line read and write it too. A writer may die in the middle of a
line: readers pass over what is not a whole JSON object, and the next writer begins on a new line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import durable_files

FOLDER = "ledger"
STEPS = "steps.jsonl"
EVENTS = "events.jsonl"


def _open_for_append(path: Path) -> int:
    """Open a ledger file, ending a line that a dead writer left torn. Raises `OSError`."""
    durable_files.make_folder(path.parent, durable=True)
    handle = os.open(
        path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, durable_files.FILE_MODE
    )
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
    found = []
    for line in data.splitlines():
        with suppress(ValueError):  # a torn line, or one of bytes that are not text
            document = json.loads(line)
            if isinstance(document, dict):
                found.append(document)
    return found


class StepLedger:
    """`steps.jsonl`, written by rank 0: step, generation, world_size, first and last sample, loss
    (`float.hex`), seconds.

    `wait_seconds` is the part of the seconds that waited in all-reduces, as far as it was known
    when the line was written.
    """

    def __init__(self, root: Path) -> None:
        self._handle = _open_for_append(root / FOLDER / STEPS)

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append one line per document in one write. Raises `OSError`."""
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        _write_all(self._handle, data)

    def sync(self) -> None:
        """Put all lines on the disk: a checkpoint is committed only after the steps that it holds.
        Raises `OSError`.
        """
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; it may be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class RunLedger:
    """`events.jsonl`, written by the leader agent and by rank 0: what happened to the run, each
    event one appended line.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER

    def append(self, event: str, **fields: Any) -> None:
        """Append an event with the time of now (unix seconds) in one write, and put it on the disk.
        Raises `OSError`.
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
        """All events, oldest first. Raises `OSError` when they are there but cannot be read."""
        return [
            one for one in _read_lines(self.folder / EVENTS) if isinstance(one.get("event"), str)
        ]

    def last_generation(self) -> int:
        """The highest generation on record; 0 before the first."""
        numbers = (one.get("generation") for one in self.events() if one["event"] == "generation")
        return max((number for number in numbers if isinstance(number, int)), default=0)

    def failures_since_progress(self) -> int:
        """Generations begun because of a failure since the committed step last rose: what the
        restart budget counts.
        """
        failures, best = 0, -1
        for one in self.events():
            if one["event"] == "generation" and one.get("reason") == "failure":
                failures += 1
            elif (
                one["event"] == "commit" and isinstance(one.get("step"), int) and one["step"] > best
            ):
                failures, best = 0, one["step"]
        return failures

    def read_steps(self) -> list[dict[str, Any]]:
        """All lines of `steps.jsonl`, oldest first: a step that was rolled back and done again
        stands there twice.
        """
        return _read_lines(self.folder / STEPS)

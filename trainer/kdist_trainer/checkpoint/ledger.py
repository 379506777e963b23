"""The ledger of a run, next to its checkpoints: one line per step and one per event, append-only.

It outlives processes and pods: restarts are counted in it and the use of samples is audited by it.
Free of torch: the agent and the command line read and write it too. `ledger_files` says how lines
are appended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.ledger_bounds import bound_events, shorten_segment
from kdist_trainer.checkpoint.ledger_files import (
    GrowingLines,
    LineFile,
    find_files,
    open_lines,
    read_lines,
    read_newest,
    read_pieces,
    sync_lines,
)
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.formats import check_format, stamp
from kdist_trainer.json_text import encode_json
from kdist_trainer.object_store.path import ObjectPath

FOLDER = "ledger"
STEPS = "steps.jsonl"
EVENTS = "events.jsonl"

StepKey = tuple[int, int]
"""Generation and step of a line of `steps.jsonl`."""


class StepLedger:
    """`steps.jsonl`, written by rank 0.

    A line has step, generation, world_size, first and last sample, loss (`float.hex`), seconds and
    wait_seconds: the part of the seconds spent waiting in all-reduces, as far as it was known when
    the line was written. The loss is null if a rank has died with its part of it before any other
    had received the mean.
    """

    def __init__(self, root: StoragePath) -> None:
        self._lines = open_lines(root / FOLDER / STEPS)

    @staticmethod
    def find_written(root: StoragePath, wanted: Collection[StepKey]) -> set[StepKey]:
        """Which of these lines, by generation and step, are among the newest ones. Nothing is read
        but what may have one of them.
        """
        found: set[StepKey] = set()
        with suppress(OSError):
            for lines in read_newest(root / FOLDER / STEPS) if wanted else ():
                keys = [
                    (int(line["generation"]), int(line["step"])) for line in lines if "step" in line
                ]
                found.update(key for key in keys if key in wanted)
                if len(found) == len(wanted) or (keys and keys[0] < min(wanted)):
                    break
        return found

    @staticmethod
    def find_last_step(root: StoragePath, generation: int) -> int:
        """The last step of a generation among the newest lines; 0 if they have none of it."""
        with suppress(OSError):
            for lines in read_newest(root / FOLDER / STEPS):
                own = [each for each in lines if each.get("generation") == generation]
                if steps := [int(each["step"]) for each in own if "step" in each]:
                    return max(steps)
                last = lines[-1].get("generation") if lines else None
                if isinstance(last, int) and last < generation:
                    break  # it has written none
        return 0

    @staticmethod
    def sync_file(root: StoragePath) -> None:
        """Make all lines durable that were written to a file which is closed by now. In an object
        store nothing is written that is not durable. Raises `OSError`.
        """
        if isinstance(root, Path):
            sync_lines(root / FOLDER / STEPS)

    def append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append one line per document in one write; in an object store they are kept until the
        next sync. Raises `OSError`.
        """
        data = "".join(encode_json(line, separators=(",", ":")) + "\n" for line in lines).encode()
        self._lines.append(data)

    def sync(self) -> None:
        """Make all lines durable, before a checkpoint of their steps is committed. Raises
        `OSError`.
        """
        self._lines.sync()

    def close(self) -> None:
        """Close the file; it may be called twice."""
        self._lines.close()


class RunLedger:
    """`events.jsonl`, one line per event, written by the agent of group rank 0, by rank 0, and by a
    rank that writes a save alone (`carried_save`).
    """

    def __init__(self, root: StoragePath) -> None:
        self._events = root / FOLDER / EVENTS
        self._lines = GrowingLines(self._events)
        self._steps = root / FOLDER / STEPS

    def append(self, event: str, **fields: Any) -> None:
        """Append an event with the current time (Unix seconds) in one write, and sync it. Raises
        `OSError`.
        """
        line = encode_json(
            stamp(EVENTS, {"time": round(time.time(), 3), "event": event, **fields}),
            separators=(",", ":"),
            default=str,
        )
        lines = _open_events(self._events)
        try:
            lines.append(line.encode() + b"\n")
            lines.sync()
        finally:
            lines.close()

    def bound(self) -> bool:
        """Write the events again, shorter, if there are too many; returns whether there were.
        Raises `OSError`.
        """
        return bound_events(self._events)

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first. Raises `OSError` if they exist but cannot be read, or
        `NewerFormatError` if a newer version wrote one.
        """
        events = [one for one in self._lines.read() if isinstance(one.get("event"), str)]
        for each in events:
            check_format(EVENTS, each)
        if isinstance(self._events, ObjectPath):  # segment after segment
            events.sort(key=_time_of)
        return events

    def last_generation(self) -> int:
        """The highest recorded generation; 0 before the first."""
        numbers = (one.get("generation") for one in self.events() if one["event"] == "generation")
        return max((number for number in numbers if isinstance(number, int)), default=0)

    def read_steps(self) -> list[dict[str, Any]]:
        """All lines of `steps.jsonl`, oldest first; a step that was rolled back and repeated has
        two. It takes a kilobyte of memory for each.
        """
        return read_lines(self._steps)

    def sum_steps(
        self, events: Iterable[Mapping[str, Any]], *, most: int | None = None
    ) -> list[dict[str, Any]]:
        """The lines of `steps.jsonl` in bounded memory, successive ones merged where there are
        many (`step_lines`).

        Args:
            events: those of this ledger.
            most: about how many records to return, as `StepLines` takes it.

        Raises:
            OSError: the storage failed.
            NewerFormatError: a newer version wrote a line.
        """
        from kdist_trainer.step_lines import StepLines

        files = find_files(self._steps)
        lines = StepLines(events, nbytes=sum(files.values()), most=most)
        for file in files:
            for piece in read_pieces(file):
                lines.add(piece)
            lines.end_file()
        return lines.records()

    def copy_steps(self, target: Path) -> None:
        """Copy `steps.jsonl` to a file on a disk, which is replaced at once. Raises `OSError`."""
        with storage.replacing(target) as copy:
            for file in find_files(self._steps):
                for piece in read_pieces(file):
                    copy.write(piece)


def find_last_sign(events: Iterable[Mapping[str, Any]], root: StoragePath | None) -> float:
    """When a run was last seen to go on, in Unix seconds: by its events, and by the newest line of
    its steps. What a node did after that, which is gone without a word, nobody knows.

    Args:
        events: those of the run.
        root: the checkpoint folder, if there is one.
    """
    now = time.time()
    times = [_time_of(each) for each in events]
    if root is not None:
        with suppress(OSError):
            files = find_files(root / FOLDER / STEPS)
            times += [storage.modified_at(each) or 0.0 for each in files]
    return min(now, max(times, default=now))


def _time_of(event: Mapping[str, Any]) -> float:
    at = event.get("time")
    return at if isinstance(at, int | float) else 0.0


_segments: dict[tuple[int, ObjectPath], LineFile] = {}
_opening = threading.Lock()


def _open_events(path: StoragePath) -> LineFile:
    """The file of events; in an object store one for the whole process, whose events are in few
    objects then.
    """
    if not isinstance(path, ObjectPath):
        return open_lines(path)
    with _opening:
        own = (os.getpid(), path)  # a forked process must not write to its parent's object
        if own not in _segments:
            _segments[own] = open_lines(path, shorten_segment)
        return _segments[own]

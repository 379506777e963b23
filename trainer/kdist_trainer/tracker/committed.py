"""Reads the ledger of a run as it grows: each step once, in rising order, when a checkpoint holds
it. What was computed and lost, and then computed again, is read as it was the last time.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from kdist_trainer.checkpoint.ledger import RunLedger, find_files, parse_lines
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.formats import LEDGER, STEPS_FILE
from kdist_trainer.object_store.store import ObjectPath

LOSS: Final = "train/loss"
SIZE: Final = "world_size"
"""The metric that every step has."""
_PIECE_BYTES: Final = 1 << 20

Point = tuple[int, dict[str, float]]
"""A step that counts, and its values by name."""
Line = dict[str, Any]


class CommittedSteps:
    """The steps after the step `after` that checkpoints hold. `done` is the run's last event, once
    it is done.
    """

    def __init__(self, root: StoragePath, after: int) -> None:
        self.done: Line | None = None
        self._ledger, self._path = RunLedger(root), root / LEDGER / STEPS_FILE
        self._after = after
        self._offsets: dict[StoragePath, int] = {}
        self._waiting: dict[int, Line] = {}
        self._newest = 0

    def read(self, *, ended: bool) -> Iterator[list[Point]]:
        """The steps that have come to count since the last reading, in pieces. Until nothing more
        is written (`ended`), a step waits for the next one: its evaluation is written before that.
        Raises `OSError`.
        """
        for lines in self._read_lines():
            yield self._take(self._newest - 1)
            self._waiting |= {line["step"]: line for line in lines if line["step"] > self._after}
            self._newest = lines[-1]["step"] if lines else self._newest
        yield self._take(self._newest - (not ended))

    def _read_lines(self) -> Iterator[list[Line]]:
        for file, size in find_files(self._path).items():
            offset = self._offsets.get(file, 0)
            if size <= offset:
                continue
            with (
                io.BytesIO(file.read_bytes()) if isinstance(file, ObjectPath) else file.open("rb")
            ) as source:
                source.seek(offset)
                while whole := (data := source.read(_PIECE_BYTES)).rfind(b"\n") + 1:
                    self._offsets[file] = offset = offset + whole
                    source.seek(offset)
                    yield [line for line in parse_lines(data[:whole]) if _is_step(line)]

    def _take(self, until: int) -> list[Point]:
        """The points up to this step that a checkpoint holds."""
        metrics: dict[int, dict[str, float]] = {}
        commits, limits, limit = set(), {}, math.inf
        events = self._ledger.events()
        ends = [event for event in events if event["event"] in ("generation", "done")]
        self.done = ends[-1] if ends and ends[-1]["event"] == "done" else None
        for event in reversed(events):
            match event:
                case {"event": "commit", "step": int(step)} if step <= limit:
                    commits.add(step)
                case {"event": "evaluated", "step": int(step), "metrics": dict(found)}:
                    metrics.setdefault(step, found)
                case {"event": "generation", "generation": int(number), "from_step": int(step)}:
                    limits[number] = limit  # its last step that no later one did again
                    limit = min(limit, step)
        last, points = min(until, max(commits, default=0)), list[Point]()
        for step in sorted(step for step in self._waiting if step <= last):
            line = self._waiting.pop(step)
            if step > limits.get(line["generation"], math.inf):
                continue
            samples = line["last"] + 1
            values = {SIZE: line["world_size"], "train/samples": samples}
            if line["seconds"] > 0:
                rate = (samples - line["first"]) / line["seconds"]
                values["throughput/samples_per_second"] = rate
            values |= {f"evaluation/{name}": one for name, one in metrics.get(step, {}).items()}
            values |= {"checkpoint/step": step} if step in commits else {}
            if line["loss"] is not None:
                values[LOSS] = float.fromhex(line["loss"])
            points.append((step, values))
            self._after = step
        return points


def _is_step(line: Line) -> bool:
    """Whether it is a line of a step: another writer's may be of another shape."""
    match line:
        case {
            "step": int(),
            "generation": int(),
            "world_size": int(),
            "first": int(),
            "last": int(),
            "loss": str() | None,
            "seconds": int() | float(),
        }:
            with suppress(ValueError, OverflowError):
                float.fromhex("0" if line["loss"] is None else line["loss"])
                return True
    return False

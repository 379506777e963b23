"""Rank 0's lines in the run's ledger: every step's samples and loss, and what happened to the run.

A disk that is full or does not answer must not end or hold a training: lines that cannot be written
in time wait for the next attempt. But no checkpoint is committed before the lines of the steps it
holds are on the disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kdist_trainer import log
from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.distributed.world import World
from kdist_trainer.processes.threads import ANSWER_SECONDS, OnDemandThread
from kdist_trainer.training.sync import StepRecord

_MAX_KEPT_LINES = 20_000


class StepLine(NamedTuple):
    """A line of the ledger before it is written; see `StepLedger`."""

    record: StepRecord
    loss: float | None
    generation: int
    world_size: int
    wait_seconds: float = 0.0

    @classmethod
    def parse(cls, line: dict[str, Any]) -> StepLine:
        """The line that `to_json` has written."""
        return cls(
            StepRecord(line["step"], line["first"], line["last"], line["seconds"]),
            None if line["loss"] is None else float.fromhex(line["loss"]),
            line["generation"],
            line["world_size"],
            line["wait_seconds"],
        )

    def to_json(self) -> dict[str, Any]:
        """The line as plain values."""
        return {
            "step": self.record.step,
            "generation": self.generation,
            "world_size": self.world_size,
            "first": self.record.first,
            "last": self.record.last,
            "loss": None if self.loss is None else self.loss.hex(),
            "seconds": round(self.record.seconds, 6),
            "wait_seconds": round(self.wait_seconds, 6),
        }


class StepLog:
    """Writes the ledger of the training loop, on a thread of its own; on ranks other than 0, and
    without a folder, it writes nothing.
    """

    def __init__(
        self,
        root: StoragePath | None,
        world: World,
        *,
        waited: Callable[[], float] = lambda: 0.0,
        keeps_lines: bool = False,
    ) -> None:
        """Open the log in a checkpoint folder; nothing is written before the first line.

        `waited` returns the seconds that this rank has waited in collectives so far. With
        `keeps_lines` each rank keeps the lines since the last commit: if rank 0 is lost with its
        disk, another one writes them.
        """
        self._root = root if world.is_rank_zero else None
        self._keeps_lines = keeps_lines and root is not None
        self._uncommitted: deque[StepLine] = deque(maxlen=_MAX_KEPT_LINES)
        self._generation, self._world_size = world.generation, world.size
        self._waited_seconds = waited
        self._waited_before = 0.0
        self._steps: StepLedger | None = None
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        """What is to be written, and how many lines that writes; 0 for an event."""
        self._refused: OSError | None = None
        """Why lines were not written at the last attempt."""
        self._writer = OnDemandThread("ledger", self._write_waiting, self._close_file)

    def add_steps(self, records: Iterable[StepRecord], losses: Iterable[float]) -> None:
        """Write one line per step; the time waited for peers since the last call is divided among
        them.
        """
        records = list(records)
        if not records or not (self._keeps_lines or self._root is not None):
            return
        waited = self._waited_seconds()
        wait = max(0.0, waited - self._waited_before) / len(records)
        self._waited_before = waited
        given = [
            StepLine(record, loss, self._generation, self._world_size, wait)
            for record, loss in zip(records, losses, strict=True)
        ]
        if self._keeps_lines:
            self._uncommitted.extend(given)
        self._post(lambda: self._append([line.to_json() for line in given]), lines=len(given))

    def uncommitted(self) -> list[dict[str, Any]]:
        return [line.to_json() for line in list(self._uncommitted)]

    def complete(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write those of the former group's lines that the ledger does not have."""
        if self._keeps_lines:
            self._uncommitted.extend(map(StepLine.parse, lines))
        self._post(lambda: self._append_missing(lines), lines=len(lines))

    def forget(self, step: int) -> None:
        """Forget the lines up to `step`: they are on the disk, and a checkpoint follows them."""
        while self._uncommitted and self._uncommitted[0].record.step <= step:
            self._uncommitted.popleft()

    def add_event(self, name: str, **fields: Any) -> None:
        if (root := self._root) is not None:
            given = {"generation": self._generation, "time": round(time.time(), 3)}
            self._post(lambda: RunLedger(root).append(name, **given, **fields))

    def flush(self) -> None:
        """Wait until what was given is written, if the disk accepts it in time."""
        if self._waiting:
            self._writer.ask()
            if not self._writer.wait(ANSWER_SECONDS):
                self._refused = TimeoutError(f"{self._root} does not answer")

    def sync(self) -> None:
        """Sync to disk every line that was given before the save began, which `flush` has waited
        for. Called before each commit, in the writer's thread, while the training may be giving the
        lines of later steps, so that waiting lines alone say nothing, or has left the group. Raises
        `OSError` if the disk has refused lines and still does, or fails now.
        """
        if self._refused is not None and self._waiting:
            self._writer.ask()
            self._writer.wait(None)
        if self._refused is not None and (count := sum([lines for _, lines in self._waiting])):
            what = f"{count} lines of the step ledger could not be written: {self._refused}"
            raise OSError(self._refused.errno, what)
        steps = self._steps
        try:
            if steps is not None:
                steps.sync()
                return
        except OSError:
            if self._steps is steps:
                raise
        if self._root is not None:  # the training has closed the file meanwhile, or never opened it
            StepLedger.sync_file(self._root)

    def close(self) -> None:
        """Write what is left, if the disk accepts it in time, and close the file; the next line
        opens it again.
        """
        self._writer.end(0.0 if isinstance(self._refused, TimeoutError) else ANSWER_SECONDS)

    def _post(self, work: Callable[[], None], *, lines: int = 0) -> None:
        if self._root is not None:
            self._waiting.append((work, lines))
            self._writer.ask()

    def _write_waiting(self) -> None:
        """Write what waits; called on the thread. Lines that are refused wait on, events do not."""
        while self._waiting:
            work, lines = first = self._waiting[0]
            try:
                work()
            except OSError as error:
                self._close_file()  # opened again, it first ends a line that was cut
                log.warn(
                    "ledger-write-failed",
                    error=str(error),
                    message=f"the run's ledger cannot be written: {error}",
                )
                if lines:
                    self._refused = error
                    return
            if self._waiting and self._waiting[0] is first:
                self._waiting.popleft()
        self._refused = None

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        assert self._root is not None  # noqa: S101 - lines are only written where there is a folder
        if self._steps is None:
            self._steps = StepLedger(self._root)
        self._steps.append(lines)

    def _append_missing(self, lines: Sequence[dict[str, Any]]) -> None:
        assert self._root is not None  # noqa: S101 - lines are only written where there is a folder
        keys = {(line["generation"], line["step"]) for line in lines}
        written = StepLedger.find_written(self._root, keys)
        self._append([one for one in lines if (one["generation"], one["step"]) not in written])

    def _close_file(self) -> None:
        steps, self._steps = self._steps, None  # first: a commit in progress may still sync it
        if steps is not None:
            steps.close()

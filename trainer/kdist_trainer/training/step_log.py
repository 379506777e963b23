"""Rank 0's lines in the run's ledger: every step's samples and loss, and what happened to the run.

A full disk must not end a training: lines that cannot be written wait for the next attempt. But no
checkpoint is committed before the lines of the steps it holds are on the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kdist_trainer import log
from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.training.sync import StepRecord
from kdist_trainer.world import World

_MAX_KEPT_LINES = 20_000


class _Line(NamedTuple):
    """A line of the ledger before it is written."""

    record: StepRecord
    loss: float | None
    wait_seconds: float
    generation: int
    world_size: int

    @classmethod
    def parse(cls, line: dict[str, Any]) -> _Line:
        """The line that `to_line` has made."""
        return cls(
            StepRecord(line["step"], line["first"], line["last"], line["seconds"]),
            None if line["loss"] is None else float.fromhex(line["loss"]),
            line["wait_seconds"],
            line["generation"],
            line["world_size"],
        )


class StepLog:
    """Writes the ledger of the training loop; on ranks other than 0, and without a folder, it
    writes nothing.
    """

    def __init__(
        self,
        root: StoragePath | None,
        world: World,
        *,
        waited: Callable[[], float] = lambda: 0.0,
        keeps_lines: bool = False,
    ) -> None:
        """Open the log; nothing is written before the first line.

        Args:
            root: Checkpoint folder; None to write nothing.
            world: The process group.
            waited: Returns the seconds that this rank has waited in collectives so far.
            keeps_lines: Whether each rank keeps the lines since the last commit: if rank 0 is lost
                with its disk, another one writes them.
        """
        self._root = root if world.is_rank_zero else None
        self._keeps_lines = keeps_lines and root is not None
        self._uncommitted: deque[_Line] = deque(maxlen=_MAX_KEPT_LINES)
        self._common = {"generation": world.generation, "world_size": world.size}
        self._waited_seconds = waited
        self._waited_before = 0.0
        self._steps: StepLedger | None = None
        self._pending: list[dict[str, Any]] = []
        self._refused = False

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
        for record, loss in zip(records, losses, strict=True):
            if self._keeps_lines:
                self._uncommitted.append(_Line(record, loss, wait, **self._common))
            if self._root is not None:
                self._pending.append(to_line(record, loss, wait_seconds=wait, **self._common))
        self.flush()

    def uncommitted(self) -> list[dict[str, Any]]:
        """The lines since the last commit, oldest first."""
        return [
            to_line(
                line.record,
                line.loss,
                wait_seconds=line.wait_seconds,
                generation=line.generation,
                world_size=line.world_size,
            )
            for line in list(self._uncommitted)
        ]

    def complete(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write those of the former group's lines that the ledger does not have."""
        keys = {(line["generation"], line["step"]) for line in lines}
        written = StepLedger.find_written(self._root, keys) if self._root is not None else set()
        for line in lines:
            if self._keeps_lines:
                self._uncommitted.append(_Line.parse(line))
            if self._root is not None and (line["generation"], line["step"]) not in written:
                self._pending.append(line)
        self.flush()

    def forget(self, step: int) -> None:
        """Forget the lines up to `step`: they are on the disk, and a checkpoint follows them."""
        while self._uncommitted and self._uncommitted[0].record.step <= step:
            self._uncommitted.popleft()

    def add_event(self, name: str, **fields: Any) -> None:
        """Write an event of the run."""
        root = self._root
        if root is not None:
            self._attempt(
                lambda: RunLedger(root).append(
                    name, generation=self._common["generation"], **fields
                )
            )

    def flush(self) -> None:
        """Write the pending lines, if the disk accepts them."""
        if not self._pending:
            return
        self._refused = not self._attempt(self._write)
        if self._refused:
            self.close()  # opened again, it first ends a line that the failure may have cut

    def sync(self) -> None:
        """Sync to disk every line that was given before the save began. Called before each commit,
        in the writer's thread, while the training may be writing the lines of later steps, so that
        pending lines alone say nothing, or has left the group.

        Raises:
            OSError: If the disk refused lines at the last attempt, or fails now.
        """
        if self._refused:
            raise OSError(f"{len(self._pending)} lines of the step ledger could not be written")
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
        """Close the file; the next line opens it again."""
        steps, self._steps = self._steps, None  # first: a commit in progress may still sync it
        if steps is not None:
            steps.close()

    def _write(self) -> None:
        assert self._root is not None  # noqa: S101 - lines are only pending where there is a folder
        if self._steps is None:
            self._steps = StepLedger(self._root)
        self._steps.append(self._pending)
        self._pending = []

    def _attempt(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            log.warn(
                "ledger-write-failed",
                error=str(error),
                message=f"the run's ledger cannot be written: {error}",
            )
            return False
        return True


def to_line(
    record: StepRecord,
    loss: float | None,
    *,
    generation: int,
    world_size: int,
    wait_seconds: float = 0.0,
) -> dict[str, Any]:
    """The ledger's line of a step; see `StepLedger`."""
    return {
        "step": record.step,
        "generation": generation,
        "world_size": world_size,
        "first": record.first,
        "last": record.last,
        "loss": None if loss is None else loss.hex(),
        "seconds": round(record.seconds, 6),
        "wait_seconds": round(wait_seconds, 6),
    }

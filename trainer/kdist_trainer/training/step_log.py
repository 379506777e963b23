"""Rank 0's lines in the run's ledger: every step's samples and loss, and what happened to the run.

A full disk must not end a training: lines that cannot be written wait for the next attempt. But no
checkpoint is committed before the lines of the steps it holds are on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kdist_trainer import log
from kdist_trainer.checkpoint.ledger import RunLedger, StepLedger
from kdist_trainer.training.sync import StepRecord
from kdist_trainer.world import World


class StepLog:
    """Writes the ledger of the training loop; on ranks other than 0, and without a folder, it
    writes nothing.
    """

    def __init__(
        self, root: Path | None, world: World, *, waited: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Open the log; nothing is written before the first line.

        Args:
            root: Checkpoint folder; None to write nothing.
            world: The process group.
            waited: Returns the seconds that this rank has waited in collectives so far.
        """
        self._root = root if world.is_rank_zero else None
        self._common = {"generation": world.generation, "world_size": world.size}
        self._waited_seconds = waited
        self._waited_before = 0.0
        self._steps: StepLedger | None = None
        self._pending: list[dict[str, Any]] = []

    def add_steps(self, records: Iterable[StepRecord], losses: Iterable[float]) -> None:
        """Write one line per step; the time waited for peers since the last call is divided among
        them.
        """
        records = list(records)
        if self._root is None or not records:
            return
        waited = self._waited_seconds()
        wait = max(0.0, waited - self._waited_before) / len(records)
        self._waited_before = waited
        for (step, first, last, seconds), loss in zip(records, losses, strict=True):
            line = {
                "step": step,
                **self._common,
                "first": first,
                "last": last,
                "loss": loss.hex(),
                "seconds": round(seconds, 6),
                "wait_seconds": round(wait, 6),
            }
            self._pending.append(line)
        self.flush()

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
        if self._pending and not self._attempt(self._write):
            self._steps = None  # opened again, it first ends a line that the failure may have cut

    def sync(self) -> None:
        """Sync every line to disk. Called before each commit, in the writer's thread.

        Raises:
            OSError: If lines are still pending, or the disk fails.
        """
        if self._pending:
            raise OSError(f"{len(self._pending)} lines of the step ledger could not be written")
        if self._steps is not None:
            self._steps.sync()

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

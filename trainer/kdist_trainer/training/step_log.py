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
        """`waited` returns the seconds that this rank has waited in all-reduces so far."""
        self._root = root if world.is_leader else None
        self._fixed = {"generation": world.generation, "world_size": world.size}
        self._waited = waited
        self._told = 0.0
        self._steps: StepLedger | None = None
        self._waiting: list[dict[str, Any]] = []

    def add_steps(self, records: Iterable[StepRecord], losses: Iterable[float]) -> None:
        """Write one line per step; the time waited for peers since the last call is divided among
        them.
        """
        records = list(records)
        if self._root is None or not records:
            return
        waited = self._waited()
        wait, self._told = max(0.0, waited - self._told) / len(records), waited
        for (step, first, last, seconds), loss in zip(records, losses, strict=True):
            line = {
                "step": step,
                **self._fixed,
                "first": first,
                "last": last,
                "loss": loss.hex(),
                "seconds": round(seconds, 6),
            }
            line |= {"wait_seconds": round(wait, 6)}
            self._waiting.append(line)
        self.flush()

    def add_event(self, name: str, **fields: Any) -> None:
        """Write an event of the run."""
        root = self._root
        if root is not None:
            self._attempt(
                lambda: RunLedger(root).append(name, generation=self._fixed["generation"], **fields)
            )

    def flush(self) -> None:
        """Write the pending lines, if the disk accepts them."""
        if self._waiting and not self._attempt(self._write):
            self._steps = None  # opened anew it first ends the line that the failure may have torn

    def sync(self) -> None:
        """Sync every line to disk. Called before each commit, in the writer's thread. Raises
        `OSError`.
        """
        if self._waiting:
            raise OSError(f"{len(self._waiting)} lines of the step ledger could not be written")
        if self._steps is not None:
            self._steps.sync()

    def _write(self) -> None:
        assert self._root is not None  # noqa: S101 - lines only wait where there is a folder
        if self._steps is None:
            self._steps = StepLedger(self._root)
        self._steps.append(self._waiting)
        self._waiting = []

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

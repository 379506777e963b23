"""A training whose rank 1 kills itself once, in its third evaluation, at its end, when all ranks
have its sums, right after it, or some steps later: the variable KILL_AT says which, and the file
KILLED that it has done so.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kdist_trainer.workload import Sums
from kdist_trainer.workloads.digits import Digits


class Evaluated(Digits):
    """`digits`."""

    evaluations, steps, is_evaluating = 0, 0, False

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        """That of `digits`."""
        self.evaluations += not self.is_evaluating
        self.is_evaluating = True
        self._die("in")
        return super().evaluate(model, batch)

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """That of `digits`."""
        self._die("end")
        return super().summarize(means)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """That of `digits`."""
        self.steps = 1 if self.is_evaluating else self.steps + 1
        self.is_evaluating = False
        self._die("after")
        if self.steps == 4:
            self._die("later")
        return super().loss(model, batch)

    def _die(self, place: str) -> None:
        killed = Path(os.environ["KILLED"])
        is_now = self.evaluations == 3 and os.environ["KILL_AT"] == place
        if is_now and os.environ["RANK"] == "1" and not killed.exists():
            killed.touch()
            time.sleep(place == "later")  # so that the state of the evaluation is saved by then
            os.kill(os.getpid(), signal.SIGKILL)

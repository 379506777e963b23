"""What a step must pass before its update counts: a gradient that is finite and, where asked, no
larger than usual.

The norm is that of the gradient after the ranks were averaged, so all ranks see the same number and
decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from kdist_trainer.config import Training

USUAL_AFTER: Final = 10
"""Steps before a gradient can be called larger than usual."""
_MEMORY = 0.95
"""Share of the mean that stays from one step to the next: about the last twenty steps count."""
MOST_ROLLBACKS: Final = 5
"""How often a training goes back to one checkpoint before it gives up."""


class GradientGuard:
    """Decides by the norm of the gradient whether an update is applied."""

    def __init__(self, settings: Training) -> None:
        self.rolls_back = settings.on_nonfinite == "rollback"
        self._factor = settings.grad_spike_factor
        self._mean = 0.0
        self._admitted = 0
        self._banned: set[int] = set()
        self._rollbacks: dict[int, int] = {}

    def judge(self, step: int, norm: float) -> str:
        """Why the update of `step` must be skipped; empty if it is applied."""
        if step in self._banned:
            return "the training went back because of it"
        if not math.isfinite(norm):
            return f"its gradient's norm is {norm}"
        if (
            self._factor is not None
            and self._admitted >= USUAL_AFTER
            and norm > self._factor * self._mean
        ):
            return (
                f"its gradient's norm {norm:.3g} is more than {self._factor:g} times the "
                f"usual {self._mean:.3g}"
            )
        self._mean = norm if not self._admitted else _MEMORY * self._mean + (1 - _MEMORY) * norm
        self._admitted += 1
        return ""

    def ban(self, step: int, *, since: int) -> bool:
        """Skip `step` from now on, after a rollback to step `since`; False if that happened too
        often.
        """
        self._banned.add(step)
        self._rollbacks[since] = self._rollbacks.get(since, 0) + 1
        return self._rollbacks[since] <= MOST_ROLLBACKS

    def is_banned(self, step: int) -> bool:
        """Whether `step` caused a rollback."""
        return step in self._banned

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"mean": self._mean, "admitted": self._admitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; banned steps stay banned."""
        self._mean, self._admitted = state["mean"], state["admitted"]

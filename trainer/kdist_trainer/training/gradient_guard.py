"""Which updates are skipped: those of a gradient that is not finite, or far larger than usual.

All ranks decide alike, since they see the norm of the gradient that is averaged over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from kdist_trainer.config import Training

WARMUP_STEPS: Final = 10
"""Applied updates before a gradient can be called larger than usual."""
_DECAY = 0.95
"""Decay of the moving mean per step: about the last twenty steps count."""
MAX_ROLLBACKS: Final = 5
"""Rollbacks to one checkpoint before the training fails."""


class Refusals(NamedTuple):
    """What a guard has decided because of rollbacks; no checkpoint holds it."""

    skipped_steps: set[int] = set()  # noqa: RUF012 - never changed in place
    rollbacks: dict[int, int] = {}  # noqa: RUF012 - never changed in place
    """Their number, by the step of the checkpoint."""


class GradientGuard:
    """Decides by the norm of the gradient whether an update is applied; every one is, and the norm
    is not needed, unless the job guards its gradients.
    """

    def __init__(self, settings: Training) -> None:
        self.needs_norm = settings.guards_gradients
        self._rollback = settings.on_nonfinite == "rollback"
        self._spike_factor = settings.grad_spike_factor
        self._mean = 0.0
        self._applied = 0
        self.refusals = Refusals()

    def skip_reason(self, step: int, norm: Tensor | float) -> str:
        """Why the update of `step` must be skipped, by the norm of its gradient (a scalar); empty
        if it is applied. Waits for the norm's device.
        """
        if not self.needs_norm:
            return ""
        norm = float(norm)
        if step in self.refusals.skipped_steps:
            return "the training was rolled back because of it"
        if not math.isfinite(norm):
            return f"its gradient's norm is {norm}"
        if (
            self._spike_factor is not None
            and self._applied >= WARMUP_STEPS
            and norm > self._spike_factor * self._mean
        ):
            return (
                f"its gradient's norm {norm:.3g} is more than {self._spike_factor:g} times the "
                f"usual {self._mean:.3g}"
            )
        self._mean = norm if not self._applied else _DECAY * self._mean + (1 - _DECAY) * norm
        self._applied += 1
        return ""

    def rolls_back(self, step: int) -> bool:
        """Whether a refused update of `step` asks for a rollback: only once for each step."""
        return self._rollback and step not in self.refusals.skipped_steps

    def skip_step(self, step: int, *, checkpoint_step: int) -> bool:
        """Skip `step` when the training comes to it again after a rollback; returns False if there
        were more than `MAX_ROLLBACKS` rollbacks to that checkpoint.
        """
        skipped, rollbacks = self.refusals
        count = rollbacks.get(checkpoint_step, 0) + 1
        self.refusals = Refusals(skipped | {step}, {**rollbacks, checkpoint_step: count})
        return count <= MAX_ROLLBACKS

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean, "admitted": self._applied}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mean = state["mean"]
        self._applied = state["admitted"]  # `refusals` stay: what led to a rollback is not repeated

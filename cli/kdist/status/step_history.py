"""The latest steps and losses of a training, and the time left by their pace."""

from __future__ import annotations

import math
from collections import deque

from kdist_trainer.formats import seconds_left

_MAX_LOSSES = 240
_MAX_STEPS = 60


class StepHistory:
    """The last observations of a training's step and loss; `losses` are finite, the newest last."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=_MAX_LOSSES)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS)

    def record(self, now: float, step: int | None, loss: float | None) -> None:
        """Record an observation at a time in seconds of any one clock; one of the same step as
        before is ignored. A lower step than before discards the pace.
        """
        if step is None or (self._steps and self._steps[-1][1] == step):
            return
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()
        self._steps.append((now, step))
        if loss is not None and math.isfinite(loss):
            self.losses.append(loss)

    def seconds_left(self, now: float, target: int | None, *, max_age: float) -> float | None:
        """Estimate the seconds until step `target` from the pace of the recorded steps; None
        without a target or a pace, or if the last step is more than `max_age` seconds old.
        """
        if len(self._steps) < 2 or now - self._steps[-1][0] > max_age:
            return None
        (since, first), (until, last) = self._steps[0], self._steps[-1]
        return seconds_left(last, target, [(until - since) / (last - first)])

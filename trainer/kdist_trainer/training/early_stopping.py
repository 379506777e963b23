"""Early stopping: ends the training when its evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kdist_trainer.config import EarlyStop
from kdist_trainer.errors import ConfigError


class EarlyStopping:
    """Counts evaluations without improvement. The metrics are equal on all ranks, so all ranks
    decide the same.
    """

    def __init__(self, settings: EarlyStop) -> None:
        self._settings = settings
        self._best: float | None = None
        self._without_improvement = 0

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of an evaluation; returns whether the training should stop.

        Raises:
            ConfigError: If the workload does not report the metric.
        """
        name = self._settings.metric
        if name not in metrics:
            raise ConfigError(
                f"train.earlyStop.metric: the evaluation has no `{name}`; it has "
                f"{', '.join(sorted(metrics)) or 'none'}"
            )
        value = metrics[name] if self._settings.goal == "min" else -metrics[name]
        if math.isfinite(value) and (
            self._best is None or value < self._best - self._settings.min_delta
        ):
            self._best = value
            self._without_improvement = 0
        else:
            self._without_improvement += 1
        return self._without_improvement >= self._settings.patience

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"best": self._best, "waited": self._without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._best = state["best"]
        self._without_improvement = state["waited"]


class NullEarlyStopping:
    """Never stops the training early."""

    def observe(self, metrics: Mapping[str, float]) -> bool:  # noqa: ARG002
        """Record nothing."""
        return False

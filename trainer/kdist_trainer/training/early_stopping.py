"""Whether a training still learns: its evaluations, one after the other, against the best one so
far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kdist_trainer.config import EarlyStop
from kdist_trainer.errors import ConfigError


class EarlyStopping:
    """Counts evaluations without progress. The same metrics on all ranks make the same decision on
    all ranks.
    """

    def __init__(self, settings: EarlyStop) -> None:
        self._settings = settings
        self._best: float | None = None
        self._waited = 0

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Take note of an evaluation; True when patience is over.

        Raises `ConfigError` where the workload does not measure what is watched.
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
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._waited >= self._settings.patience

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._best, self._waited = state["best"], state["waited"]

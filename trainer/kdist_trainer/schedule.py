"""The learning rate's curve: a linear warm-up, then constant, a line or half a cosine down to `finalRatio` of the peak."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from kdist_trainer import config


def factor(settings: config.Schedule, *, steps: int) -> Callable[[int], float]:
    """The function from step (0 = first) to the share of the peak rate that this step uses.

    The warm-up's first step already moves: it takes 1/(warmupSteps + 1) of the peak. The last step takes `finalRatio`.
    """
    warmup, final = settings.warmup_steps, settings.final_ratio
    falling = max(1, steps - 1 - warmup)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if settings.name == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / falling)
        if settings.name == "linear":
            return final + (1 - final) * (1 - done)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return share


def build(optimizer: Optimizer, settings: config.Schedule, *, steps: int) -> LRScheduler | None:
    """The scheduler that job.yaml asks for; None for a rate that never moves, which then costs nothing per step."""
    if settings.name == "constant" and settings.warmup_steps == 0:
        return None
    return LambdaLR(optimizer, factor(settings, steps=steps))

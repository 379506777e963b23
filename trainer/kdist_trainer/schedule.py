"""The learning rate's curve: a linear warm-up, then constant, a line or half a cosine down to `finalRatio` of the peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
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


class Curve(LambdaLR):
    """The learning rate that job.yaml asks for. It follows from the step alone, so that any step can be gone on from."""

    def __init__(self, optimizer: Optimizer, settings: config.Schedule, *, steps: int) -> None:
        super().__init__(optimizer, factor(settings, steps=steps))
        self.settings = settings

    def place(self, step: int, *, steps: int) -> None:
        """Be where a run of `steps` steps is after `step` of them, at the rates that the optimizer's groups begin with."""
        share = factor(self.settings, steps=steps)
        self.lr_lambdas = [share for _ in self.optimizer.param_groups]
        self.base_lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        self.last_epoch = step
        self._last_lr = [base * share(step) for base in self.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_rate(group, rate)

    def state_dict(self) -> dict[str, Any]:
        """The step. Everything else is the job's, or the optimizer's."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; `place` makes it count."""
        self.last_epoch = state_dict["last_epoch"]


def build(optimizer: Optimizer, settings: config.Schedule, *, steps: int) -> LRScheduler | None:
    """The scheduler that job.yaml asks for; None for a rate that never moves, which then costs nothing per step."""
    if settings.name == "constant" and settings.warmup_steps == 0:
        return None
    return Curve(optimizer, settings, steps=steps)


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Give a group of parameters a learning rate, which may be a tensor that a compiled step holds on to."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


_FIELDS = {"optimizer.weightDecay": "weight_decay", "optimizer.momentum": "momentum", "optimizer.betas": "betas"}


def take_over(optimizer: Optimizer, asked: Sequence[Mapping[str, Any]], edited: Collection[str], scheduler: Any = None) -> None:
    """Let `edited` fields of `spec.train` win over what a checkpoint brought into the optimizer's groups.

    `asked`: the groups as they were made from the present job, with their `initial_lr`. A scheduler of the workload's own goes
    on from its saved state, at rates that are scaled as the job's rate was.
    """
    for group, wanted in zip(optimizer.param_groups, asked, strict=True):
        for field, key in _FIELDS.items():
            if field in edited and key in wanted:
                group[key] = wanted[key]
        if "optimizer.learningRate" in edited:
            before, now = group["initial_lr"], wanted["initial_lr"]
            set_rate(group, group["lr"] * (now / before) if before else now)
            group["initial_lr"] = now
        if scheduler is None and any(field.startswith(("schedule.", "optimizer.learningRate")) for field in edited):
            set_rate(group, group["initial_lr"])
    if "optimizer.learningRate" in edited and hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]

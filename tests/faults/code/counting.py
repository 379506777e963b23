"""A training whose optimizer counts its steps in a plain attribute, and takes a larger step each
time that the count reaches a multiple of option `period`. What is in an attribute is in no state:
a rank that takes the place of another one counts from 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from kdist_trainer.workload import Workload


class CountingSgd(SGD):
    """SGD that counts its steps where nobody looks."""

    def __init__(self, parameters: Any, *, period: int) -> None:
        super().__init__(parameters, lr=0.05)
        self.period = period
        self.calls = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self.calls += 1
        if self.calls % self.period == 0:
            for group in self.param_groups:
                for one in group["params"]:
                    one.grad.mul_(1 + 0.1 * self.calls)
        found: float | None = super().step(closure)
        return found


class Counting(Workload):
    """Options: `period`, see the file; `pause`, seconds of each loss."""

    def model(self) -> nn.Module:
        return nn.Linear(6, 1)

    def optimizer(self, model: nn.Module, _: Any) -> Optimizer:
        return CountingSgd(model.parameters(), period=self.context.options["period"])

    def dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        return TensorDataset(torch.randn(240 if split == "train" else 24, 6, generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        time.sleep(self.context.options["pause"])
        return (model(batch[0]) - 1).pow(2).sum(), len(batch[0])

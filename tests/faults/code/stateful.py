"""A workload with all that makes equal bits hard: what a training must carry over besides weights,
or draw again alike.

Batch norms, one of them in a submodule that is frozen; dropout; samples and losses that draw from
NumPy's and Python's generators, the loss only now and then; two groups of parameters; a
MultiStepLR, whose state is no JSON.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from kdist_trainer import config
from kdist_trainer.workload import Samples, Split, Workload

FEATURES, CLASSES = 16, 3


class Augmented:
    """Made-up samples, each moved a little at random whenever it is read."""

    def __init__(self, length: int, seed: int, *, noise: float) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (length,), generator=draw)
        self.inputs = torch.randn(length, FEATURES, generator=draw) + self.labels[:, None]
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = self.noise * random.random() + self.noise * np.random.rand(FEATURES)
        return self.inputs[index] + torch.from_numpy(shift).float(), self.labels[index]


class Net(nn.Module):
    """Frozen features below, a classifier above; with a constant buffer."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = (
            nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width))
            .eval()
            .requires_grad_(False)
        )
        self.head = nn.Sequential(
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, CLASSES),
        )
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, inputs: Tensor) -> Any:
        """Input [n, FEATURES], output [n, CLASSES]."""
        return self.head(self.frozen(inputs) * self.scale)


class Stateful(Workload):
    """Options: width, length, pause (seconds in each loss)."""

    def model(self) -> nn.Module:
        return Net(self.context.options.get("width", 24))

    def dataset(self, split: Split) -> Samples:
        if split == "test":
            return Augmented(40, 8, noise=0.0)
        return Augmented(self.context.options.get("length", 50), 7, noise=0.1)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        time.sleep(self.context.options.get("pause", 0))
        if model.training and random.random() < 0.5:
            inputs = inputs * float(1 + 0.1 * np.random.rand())
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:
        decayed = [one for one in model.parameters() if one.requires_grad and one.ndim > 1]
        others = [one for one in model.parameters() if one.requires_grad and one.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return AdamW(groups, lr=settings.learning_rate)

    def scheduler(
        self,
        optimizer: Optimizer,
        settings: config.Schedule,  # noqa: ARG002
        *,
        steps: int,
    ) -> LRScheduler:
        return MultiStepLR(optimizer, [steps // 3, 2 * steps // 3], gamma=0.3)

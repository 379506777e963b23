"""bench.recovery's work under kdist's managed loop: the model of bench/script.py, and the same file
of marks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench.script import mark
from kdist_trainer.workload import Split, Workload


class Steady(Workload):
    """Noise through a small perceptron; the loss of a step is asked for when the step before it has
    ended.
    """

    calls = 0

    def model(self) -> nn.Module:
        """Input [n, 64], output [n, 10]."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def dataset(self, split: Split) -> TensorDataset:  # noqa: ARG002
        """Noise with labels."""
        draw = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(4096, 64, generator=draw), torch.randint(10, (4096,), generator=draw)
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy, summed."""
        if self.calls:
            mark(self.calls)
            time.sleep(0.02)
        self.calls += 1
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

"""bench.cluster's work: a step of some 50 ms, after which the rank prints who it is and when."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from kdist_trainer import config
from kdist_trainer.workload import Split, Workload


class Noted(Workload):
    """Noise through a small perceptron, which prints a line after each step of its optimizer."""

    def model(self) -> nn.Module:
        """Input [n, 64], output [n, 10]; with the option `hidden`, a layer of that square."""
        hidden: int = self.context.options.get("hidden", 64)
        wide = [nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 64)]
        return nn.Sequential(*wide, nn.ReLU(), nn.Linear(64, 10))

    def dataset(self, split: Split) -> TensorDataset:  # noqa: ARG002
        """Noise with labels."""
        draw = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(4096, 64, generator=draw), torch.randint(10, (4096,), generator=draw)
        )

    def optimizer(self, model: nn.Module, settings: config.Optimizer) -> Optimizer:
        """The job's."""
        made = super().optimizer(model, settings)
        made.register_step_post_hook(note)
        return made

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy, summed."""
        time.sleep(0.05)
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def note(optimizer: Optimizer, *_: Any) -> None:
    """Print the pid, the generation, the number of ranks and the time of a finished step."""
    # a step without gradients only makes the optimizer's state, before it is restored
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
    if any(gradient is not None and gradient.any() for gradient in gradients):
        generation, size = os.environ["KDIST_GENERATION"], os.environ["WORLD_SIZE"]
        print(f"finished {os.getpid()} {generation} {size} {time.time()}", flush=True)

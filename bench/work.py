"""The work that every contestant does: one perceptron on the same samples in memory, with a clock
at each forward pass.
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter, process_time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kdist_trainer.config import ConfigModel
from kdist_trainer.workload import Split, Workload, WorkloadContext

SAMPLES = 4096


class Options(ConfigModel):
    """Size of the perceptron."""

    width: int = 32
    depth: int = 1
    norms: int = 0
    """1: a batch norm after every hidden layer."""


class Work(Workload):
    """A perceptron of `depth` hidden layers. Every call of `loss` is noted in `marks`: two marks
    enclose one step.
    """

    marks: ClassVar[list[float]] = []
    cpu_marks: ClassVar[list[float]] = []

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.options = context.parse(Options)

    def model(self) -> nn.Module:
        """Input [n, width], output [n, 10]."""
        width = self.options.width
        layers: list[nn.Module] = []
        for _ in range(self.options.depth):
            norms = [nn.BatchNorm1d(width) for _ in range(self.options.norms)]
            layers += [nn.Linear(width, width), *norms, nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def dataset(self, split: Split) -> TensorDataset:  # noqa: ARG002
        """Noise with labels: what is measured does not depend on it."""
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, self.options.width, generator=draw)
        return TensorDataset(inputs, torch.randint(10, (SAMPLES,), generator=draw))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy, summed."""
        self.marks.append(perf_counter())
        self.cpu_marks.append(process_time())
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def take_marks(*, warm: int) -> list[float]:
    """Seconds of each step since the last call, without the first `warm` ones."""
    Work.cpu_marks.clear()
    return _take(Work.marks, warm)


def take_both(*, warm: int) -> tuple[list[float], list[float]]:
    """The same, and the seconds that the rank's process computed in each step, all of its threads
    together.
    """
    return _take(Work.marks, warm), _take(Work.cpu_marks, warm)


def _take(marks: list[float], warm: int) -> list[float]:
    taken = marks[warm:]
    marks.clear()
    return [after - before for before, after in pairwise(taken)]

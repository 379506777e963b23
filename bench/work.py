"""The work that every contestant does: one perceptron on the same samples in memory, with a clock at each forward pass."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter, thread_time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from kdist_trainer.config import Model
from kdist_trainer.workload import Split, Workload, WorkloadContext

SAMPLES = 4096


class Options(Model):
    """Size of the perceptron."""

    width: int = 32
    depth: int = 1


class Work(Workload):
    """A perceptron of `depth` hidden layers. Every call of `loss` is noted in `marks`: two marks enclose one step."""

    marks: ClassVar[list[tuple[float, float]]] = []

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.options = context.parse(Options)

    def model(self) -> nn.Module:
        """Input [n, width], output [n, 10]."""
        width = self.options.width
        layers = [layer for _ in range(self.options.depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def dataset(self, split: Split) -> TensorDataset:  # noqa: ARG002
        """Noise with labels: what is measured does not depend on it."""
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, self.options.width, generator=draw)
        return TensorDataset(inputs, torch.randint(10, (SAMPLES,), generator=draw))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy, summed."""
        self.marks.append((perf_counter(), thread_time()))
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def take_marks(*, warm: int) -> tuple[list[float], list[float]]:
    """Seconds of each step since the last call without the first `warm` ones: by the clock, and of this thread's work.

    The second leaves out what waits, but also what other processes of the machine took away.
    """
    marks, Work.marks[:] = Work.marks[warm:], []
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(marks)]
    clock, work = zip(*steps, strict=True)
    return list(clock), list(work)

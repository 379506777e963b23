"""bench.soak's work under the managed loop, whose checkpoints wait while a file says so."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from kdist_trainer.checkpoint.storage import Operation, observed
from kdist_trainer.workload import Split, Workload

STEP_SECONDS = 0.01
_LOOK_SECONDS = 0.05
_observing = ExitStack()


def make_model() -> nn.Module:
    """A small perceptron with a megabyte of weights."""
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.Linear(256, 10))


def hold_storage(mark: Path) -> None:
    """From now on, a save of this process waits in its middle for as long as the file `mark` is
    there, as if the storage had stopped answering.
    """
    _observing.close()

    def wait(operation: Operation) -> None:
        while operation.name == "fsync" and mark.exists():
            time.sleep(_LOOK_SECONDS)

    _observing.enter_context(observed(wait))


class Soaked(Workload):
    """Noise through a small perceptron. Option `hold` is the file by which saves wait."""

    def model(self) -> nn.Module:
        """Input [n, 64], output [n, 10]."""
        hold_storage(Path(self.context.options["hold"]))
        return make_model()

    def dataset(self, split: Split) -> TensorDataset:  # noqa: ARG002
        """Noise with labels."""
        draw = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(4096, 64, generator=draw), torch.randint(10, (4096,), generator=draw)
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Cross-entropy, summed."""
        time.sleep(STEP_SECONDS)  # so that the machine is not busy with the steps themselves
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

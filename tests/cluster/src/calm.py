"""The digits, at a walking pace: steps last long enough to be disturbed, and leave the cores to the
other tests.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from kdist_trainer.workload import Split, Sums
from kdist_trainer.workloads.digits import Digits


class Calm(Digits):
    """Options as those of `digits`."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of `digits`, a twentieth of a second later."""
        time.sleep(0.05)
        return super().loss(model, batch)


class Sleepy(Digits):
    """Options as those of `digits`: many of it on few cores leave most of them to what starts."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of `digits`, half a second later."""
        time.sleep(0.5)
        return super().loss(model, batch)


class Corpus(Calm):
    """Prints each file below `/corpus` with its size, before it trains on `digits`."""

    def dataset(self, split: Split) -> TensorDataset:
        """That of `digits`."""
        folder = Path(self.context.data["/corpus"])
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sys.stdout.write(f"corpus {path.relative_to(folder)} {path.stat().st_size}\n")
        return super().dataset(split)


class Pensive(Calm):
    """Takes ten seconds to be measured."""

    measured = False

    def evaluate(self, model: nn.Module, batch: Any) -> Sums:
        """What `digits` measures, later."""
        time.sleep(0.0 if self.measured else 10.0)
        self.measured = True
        return super().evaluate(model, batch)


class Stuck(Calm):
    """Rank 1 sleeps for ever in its sixth loss."""

    losses = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of `digits`, or none."""
        self.losses += torch.is_grad_enabled()
        if self.losses == 6 and os.environ["RANK"] == "1":
            time.sleep(3600)
        return super().loss(model, batch)


class Faulty(Digits):
    """On the machine that the job names by `BAD_MACHINE`, the GPU fails at the fifth loss of the
    run's first two worker groups. A step of the next two takes some seconds: those that wait there
    to be moved, and those that are elsewhere.
    """

    losses = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """The loss of `digits`, or none."""
        self.losses += torch.is_grad_enabled()
        if (group := int(os.environ["KDIST_GENERATION"])) > 2:
            time.sleep(0.5 if group > 4 else 2.5)
        elif self.losses == 5 and os.environ["KDIST_MACHINE"] == os.environ["BAD_MACHINE"]:
            error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
            error.error_code = 214  # type: ignore[attr-defined]  # set by C++, and in no stub
            raise error
        return super().loss(model, batch)

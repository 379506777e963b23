"""A small model in which a forward pass changes what no optimizer owns: option `moves` says what,
`states` for how many parameters the optimizer has a state, `compiled` which part is compiled.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from kdist_trainer.workload import Workload

WIDTH = 6


class Net(nn.Module):
    """Options: see the file. All that is moved is a part of the result."""

    scale: Tensor | None
    flag: Tensor
    count: Tensor

    def __init__(self, moves: str, *, compiled: bool, late: int) -> None:
        super().__init__()
        self.moves = moves
        self.first_late_pass = late
        body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(body).requires_grad_(False)
        self.body: Any = torch.compile(body, backend="eager") if compiled else body
        self.norm = nn.BatchNorm1d(4)
        self.passes = 0
        self.register_buffer("scale", None)
        self.register_buffer("flag", torch.zeros(1, dtype=torch.bool))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "powers": torch.tensor([0.5**self.passes])}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.passes = int(state["passes"])

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.move(inputs)
        factor = 1.0 + 0.01 * self.passes + 0.1 * self.flag.float() + 0.01 * self.count
        if self.scale is not None:
            factor = factor + 0.1 * self.scale.mean()
        if hasattr(self, "late"):
            factor = factor + 0.1 * self.get_buffer("late")
        target = self.teacher(inputs.flip(-1)).detach()
        found: Tensor = (self.norm(self.body(inputs) * factor) - target).pow(2).sum(1)
        return found

    def move(self, inputs: Tensor) -> None:
        """Change what `moves` says."""
        pairs = list(zip(self.teacher.parameters(), self.body.parameters(), strict=True))
        moves = self.moves
        if moves in ("no_grad", "everything"):
            with torch.no_grad():
                for old, new in pairs:
                    old.mul_(0.9).add_(new, alpha=0.1)
        if moves in ("data", "everything"):
            for number, (old, new) in enumerate(pairs):
                if number % 2:
                    old.data = old.data * 0.9 + new.data * 0.1
                else:
                    old.data.mul_(0.9).add_(new.data, alpha=0.1)
        if moves in ("extra", "late", "everything"):
            self.passes += 1
        if moves in ("none", "everything"):
            self.scale = inputs.mean(0) if self.scale is None else self.scale * 0.9
        if moves in ("toggle", "everything"):
            self.flag.logical_not_()
        if moves == "late" and self.passes >= self.first_late_pass:
            self.count.numpy()[...] += 1
        if moves == "late" and self.passes == self.first_late_pass:
            self.register_buffer("late", torch.tensor(0.5))


class Moved(Workload):
    """Options: see the file; `pause`, seconds of each loss; `late`, the pass from which on a count
    and a new buffer move, for `moves: late`.
    """

    def model(self) -> nn.Module:
        options = self.context.options
        compiled, late = options["compiled"], options["late"]
        net = Net(options["moves"], compiled=compiled == "part", late=late)
        whole: Any = torch.compile(net, backend="eager") if compiled == "whole" else net
        return whole  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module, _: Any) -> Optimizer:
        first, *others = [one for one in model.parameters() if one.requires_grad]
        states = self.context.options["states"]
        return torch.optim.SGD(
            [
                {"params": [first], "momentum": 0.0 if states == "none" else 0.9},
                {"params": others, "momentum": 0.9 if states == "all" else 0.0},
            ],
            lr=0.05,
        )

    def dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        return TensorDataset(
            torch.randn(240 if split == "train" else 24, WIDTH, generator=generator)
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        time.sleep(self.context.options["pause"])
        return model(batch[0]).sum(), len(batch[0])

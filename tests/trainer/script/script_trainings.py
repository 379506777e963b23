"""Trainings of scripts, each with something easily lost: two optimizers, a layer that thaws, one
without gradients, schedules of NumPy's numbers, generators, positions.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kdist_trainer import Checkpointer

EVERY = 2


class Sampler:
    """What has a position of its own, in types that JSON does not know."""

    def __init__(self) -> None:
        self.position = 0

    def draw(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[Any, Any]:
        return {"position": torch.tensor(self.position), 7: (1, "a"), "array": np.arange(3)}

    def load_state_dict(self, saved: dict[Any, Any]) -> None:
        assert saved[7] == (1, "a")
        assert saved["array"].tolist() == [0, 1, 2]
        self.position = int(saved["position"])


class Training:
    """A script's objects; `step` does one step."""

    extra: dict[str, Any]
    number = 0
    checkpointer: Checkpointer

    def do(self, number: int, checkpointer: Checkpointer) -> None:
        """Do the step of this number."""
        self.number, self.checkpointer = number, checkpointer
        self.step()

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.extra = {}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        modules = self.model.values() if isinstance(self.model, dict) else [self.model]
        return [value for module in modules for value in module.state_dict().values()]


class TwoPlayers(Training):
    """A generator and a discriminator, each with its optimizer, dropout and running means."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        self.model = {"generator": nn.Sequential(*layers), "critic": nn.Linear(2, 1)}
        self.optimizer = {
            "generator": torch.optim.AdamW(self.model["generator"].parameters(), lr=0.01),
            "critic": torch.optim.SGD(self.model["critic"].parameters(), lr=0.1, momentum=0.9),
        }
        decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer["generator"], 0.9)
        self.extra = {"scheduler": {"decay": decay}}

    def step(self) -> None:
        fake = self.model["generator"](torch.randn(8, 3))
        score = self.model["critic"](fake).square().mean()
        for one in self.optimizer.values():
            one.zero_grad()
        score.backward()
        for one in self.optimizer.values():
            one.step()
        self.extra["scheduler"]["decay"].step()


class Unfreezing(Training):
    """A layer that gets gradients, and a group of its own, in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.AdamW(self.model[1].parameters(), lr=0.1)

    def step(self) -> None:
        if self.number == 3:
            self.model[0].requires_grad_(requires_grad=True)
            self.optimizer.add_param_group({"params": self.model[0].parameters(), "lr": 0.3})
        super().step()


class Unused(Training):
    """A layer without gradients, which the optimizer has no state of."""

    def __init__(self) -> None:
        super().__init__()
        self.model.add_module("unused", nn.Linear(2, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model[1](self.model[0](torch.randn(8, 4))).square().mean().backward()
        self.optimizer.step()


class Schedules(Training):
    """NumPy's numbers in the keys of a schedule and in its rates; a scaler."""

    def __init__(self) -> None:
        super().__init__()
        milestones = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, np.arange(2, 8, 2))
        cosine = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 8))
        )
        self.extra = {
            "scheduler": {"milestones": milestones, "cosine": cosine},
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        }

    def step(self) -> None:
        scaler = self.extra["scaler"]
        self.optimizer.zero_grad()
        scaler.scale(self.model(torch.randn(8, 4)).square().mean()).backward()
        scaler.step(self.optimizer)
        scaler.update()
        for one in self.extra["scheduler"].values():
            one.step()


class Drawing(Training):
    """Numbers of all three generators, an object with a position, typed keys, a late buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("mean", None)
        self.sampler = Sampler()
        self.extra = {"stateful": {"sampler": self.sampler}}

    def step(self) -> None:
        assert self.checkpointer.state.get(self.number - 1, (0,)) == (self.sampler.position,)
        scale = random.random() + np.random.rand() + 0.1 * self.sampler.draw()
        self.optimizer.zero_grad()
        out = self.model[1](self.model[0](torch.randn(8, 4)))
        (out * scale).square().mean().backward()
        self.optimizer.step()
        if self.number >= 3:
            before = torch.zeros(2) if self.model.mean is None else self.model.mean
            self.model.mean = 0.9 * before + out.detach().mean(0)
        self.checkpointer.state[self.number] = (self.sampler.position,)
        self.checkpointer.shared_state["last"] = {"step": np.int64(self.number)}


def checkpointer_of(one: Training) -> Checkpointer:
    return Checkpointer(
        model=one.model,
        optimizer=one.optimizer,
        every_steps=EVERY,
        mode="blocking",
        **one.extra,
    )


def train(kind: type[Training], last: int) -> Training:
    one = kind()
    with checkpointer_of(one) as checkpointer:
        for step in range(checkpointer.resume() + 1, last + 1):
            one.do(step, checkpointer)
            checkpointer.maybe_save(step)
    return one

"""What a pass changes in plain attributes of a model is found and undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdist_trainer import log
from kdist_trainer.state import Attributes
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import Small, describe, train


class Counting(nn.Module):
    """Counts its passes in every way that no state has."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.mean = torch.zeros(2)
        self.last: Any = "none"
        self.constant = 3.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        self.mean += 1
        self.last = inputs * 2
        return inputs


class Kept(Counting):
    """Says itself what is kept."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


def test_attributes_that_a_pass_changes_are_named_and_put_back() -> None:
    counting, kept = Counting(), Kept()
    model = nn.Sequential(counting, kept)
    mean = counting.mean
    attributes = Attributes(model)
    model(torch.ones(2))
    assert attributes.restore() == ["0.passes", "0.mean", "0.last"]
    assert (counting.passes, counting.last, kept.passes) == (0, "none", 1)
    assert counting.mean is mean
    assert torch.equal(mean, torch.zeros(2))


class Slowing(torch.optim.SGD):
    """Counts its steps where no state has them."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class SlowSteps(Small):
    """Its model and its optimizer count in attributes."""

    def model(self) -> nn.Module:
        return nn.Sequential(Counting(), super().model())

    def optimizer(self, model: nn.Module, optimizer: Any) -> torch.optim.Optimizer:  # noqa: ARG002 - the base's
        return Slowing(model.parameters(), lr=0.1)


def listen(folder: Path) -> list[str]:
    """Train; what the training logs about attributes."""
    lines: list[bytes] = []
    log.write_to(lines.append)
    train(describe(workload=f"{__name__}:SlowSteps", epochs=1), folder)
    return [line.decode() for line in lines if b"attributes-not-kept" in line]


def test_a_training_names_them_at_its_start(tmp_path: Path) -> None:
    environment = {"KDIST_CHECKPOINTS": str(tmp_path / "checkpoints")}
    (lines,) = run_group(listen, 1, tmp_path, environment=environment)
    passes, steps = lines
    assert "a pass changes 0.passes and 2 more, a plain attribute" in passes
    assert "a step changes Slowing.steps, a plain attribute of the optimizer" in steps


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor"])
def test_no_optimizer_of_torch_is_named(name: str) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    attributes = Attributes(optimizer)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    scheduler.step()
    assert attributes.find_changed() == []

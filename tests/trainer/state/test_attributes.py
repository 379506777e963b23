"""What a pass changes in plain attributes of a model is found and undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdist_trainer.state import Attributes
from tests.trainer.training.tasks import Small, describe, train_here


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
    model = nn.Sequential(Counting(), Kept())
    mean = model[0].mean
    attributes = Attributes(model)
    model(torch.ones(2))
    assert attributes.restore() == ["0.passes", "0.mean", "0.last"]
    assert (model[0].passes, model[0].last, model[1].passes) == (0, "none", 1)
    assert model[0].mean is mean
    assert torch.equal(mean, torch.zeros(2))


class PassCounter(Small):
    """Its model counts in attributes."""

    def model(self) -> nn.Module:
        return nn.Sequential(Counting(), super().model())


def test_a_training_names_them_at_its_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workload = f"{__name__}:PassCounter"
    train_here(describe(workload=workload, epochs=1), tmp_path, 1)
    lines = capfd.readouterr()
    found = [line for line in (lines.out + lines.err).splitlines() if "attributes-not-kept" in line]
    assert len(found) == 1
    assert "a pass changes 0.passes and 2 more, a plain attribute" in found[0]

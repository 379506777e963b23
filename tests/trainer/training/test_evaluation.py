"""A rank that an error takes out of an evaluation keeps its state if the model is unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdist_trainer.training import trainer
from kdist_trainer.training.context import TrainContext
from tests.trainer.training.group import run_group
from tests.trainer.training.tasks import Small, describe, train


class Unswapped(Small):
    """Uses other weights in its evaluation, which fails before they are put back."""

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, int]]:  # noqa: ARG002 - it fails
        if self.context.options["swaps"]:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
        raise RuntimeError("a peer is lost")


def leave(folder: Path, swaps: bool) -> bool:
    """Leave an evaluation by an error; whether the state of the rank counts as whole then."""
    seen: list[TrainContext] = []
    original = trainer.setup

    def setup(ctx: TrainContext) -> None:
        seen.append(ctx)
        original(ctx)

    section = {"evaluate": "end", "epochs": 1, "options": {"swaps": swaps}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "setup", setup)
        with pytest.raises(RuntimeError, match="a peer is lost"):
            train(describe(workload=f"{__name__}:Unswapped", **section), folder)
    return seen[0].is_consistent


@pytest.mark.processes
@pytest.mark.parametrize("swaps", [False, True])
def test_a_state_is_kept_only_if_the_evaluation_has_left_the_model_as_it_was(
    swaps: bool, tmp_path: Path
) -> None:
    environment = {"KDIST_CHECKPOINTS": str(tmp_path / "checkpoints")}
    assert run_group(leave, 2, tmp_path, swaps, environment=environment) == [not swaps] * 2

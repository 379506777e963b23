"""Ranks that ought to hold the same state are compared by its digest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdist_trainer.training import transfer
from kdist_trainer.world import World
from tests.trainer.training.group import run_group


def compare_states() -> list[str | None]:
    """What is found where all are equal, where one has no state, and where rank 2 differs."""
    with World.from_environment(timeout_seconds=60) as world:
        ctx: Any = SimpleNamespace(world=world)
        values: dict[str, Any] = {
            "model": {"a": torch.zeros(2), "_extra_state": {"passes": 3}},
            "scheduler": ({"last": 1},),
        }
        equal = transfer.compare(ctx, 0, values)
        own = values if world.rank else None
        without = transfer.compare(ctx, 1, own)
        if world.rank == 2:
            values["model"]["_extra_state"]["passes"] = 4
            values["model"]["a"][1] = -0.0
        return [equal, without, transfer.compare(ctx, 0, values)]


@pytest.mark.processes
def test_every_rank_learns_which_values_one_holds_in_other_bits() -> None:
    found = run_group(compare_states, 3)
    text = "ranks hold 2 values (model._extra_state.passes, model.a) of the same step in different"
    assert found == [[None, None, f"{text} bits"]] * 3

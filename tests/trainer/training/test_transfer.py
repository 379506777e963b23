"""Ranks that ought to hold the same state are compared by its digest, and a rank that cannot take
over what is sent keeps no other waiting.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdist_trainer.distributed.world import World
from kdist_trainer.state import BufferNames, describe
from kdist_trainer.training import regroup
from tests.trainer.training.group import run_group


def compare_states() -> list[str | None]:
    """What is found where all are equal, where one has no state, and where rank 2 differs."""
    with World.from_environment(timeout_seconds=60) as world:
        ctx: Any = SimpleNamespace(world=world)
        values: dict[str, Any] = {
            "model": {"a": torch.zeros(2), "_extra_state": {"passes": 3}},
            "scheduler": ({"last": 1},),
        }
        equal = regroup.compare(ctx, 0, values)
        own = values if world.rank else None
        without = regroup.compare(ctx, 1, own)
        if world.rank == 2:
            values["model"]["_extra_state"]["passes"] = 4
            values["model"]["a"][1] = -0.0
        return [equal, without, regroup.compare(ctx, 0, values)]


@pytest.mark.processes
def test_every_rank_learns_which_values_one_holds_in_other_bits() -> None:
    found = run_group(compare_states, 3)
    text = "ranks hold 2 values (model._extra_state.passes, model.a) of the same step in different"
    assert found == [[None, None, f"{text} bits"]] * 3


class Training:
    """A rank that has a model of one weight, of `size` elements."""

    def __init__(self, size: int) -> None:
        self.values: dict[str, Any] = {"model": {"weight": torch.arange(float(size))}}

    def tensors(self) -> dict[str, Any]:
        return {"model": dict(self.values["model"])}

    def template(self, _saved: Any, **_: Any) -> dict[str, Any]:
        return {"model": {"weight": torch.zeros_like(self.values["model"]["weight"])}}


def receive_states() -> tuple[str | None, str | None, float]:
    """Rank 1 sends; rank 2 has a smaller model than the others."""
    with World.from_environment(timeout_seconds=60) as world:
        training, buffers = Training(4 if world.rank == 2 else 5), SimpleNamespace(unsaved=dict)
        sends = world.rank == 1
        if sends:
            training.values["model"]["weight"] += 1
        ctx: Any = SimpleNamespace(
            world=world,
            buffers=buffers,
            handover=SimpleNamespace(is_current=sends, kept=None),
            checkpointing=SimpleNamespace(training=training),
        )
        kinds = world.broadcast_object(describe(regroup.held_values(ctx)), source=1)
        described = {"kinds": kinds, "buffers": BufferNames()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                regroup, "load_values", lambda _, values, __: training.values.update(values)
            )
            own = regroup.receive_state(ctx, 1, {"values": described})
        every = regroup.compare(ctx, 1, regroup.held_values(ctx), own)
        return own, every, float(training.values["model"]["weight"].sum())


@pytest.mark.processes
def test_a_rank_with_another_model_keeps_nobody_waiting_and_all_learn_why() -> None:
    why = "rank 2 has other values: 1 values (model.weight)"
    assert run_group(receive_states, 3) == [
        (None, why, 15.0),
        (None, why, 15.0),
        (why, why, 6.0),
    ]

"""A checkpoint belongs to no strategy: each one takes over the state of each other bitwise, at
another number of ranks.

A run that has reached its last step is resumed, which takes its state over, and ends with saving
it: what was saved first and what was saved then must be the same weights, optimizer, averages and
position.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from kdist_trainer.checkpoint.lock import Lock
from tests.trainer.training.cells import OFFLOADED, STRATEGIES, document, layout
from tests.trainer.training.tasks import train_here

pytestmark = pytest.mark.processes
WRITERS = {"data_parallel": 1}
"""Ranks that save under a strategy; 2 where nothing is said."""
READERS = {"hsdp": (3, 4), "tensor": (1, 4), "pipeline": (1, 4), "data_parallel": (1,)}
"""Ranks that resume under it; 1 and 3 where nothing is said."""
STATE: dict[str, Any] = {
    "steps": 3,
    "optimizer": {"name": "adamw", "learningRate": 0.01},
    "schedule": {"name": "cosine", "warmupSteps": 2},
    "clipGradNorm": 1.0,
    "emaDecay": 0.9,
    "evaluate": "never",
}
"""What gives a training as much state as it can have."""


def state_of(folder: Path) -> dict[str, Any]:
    """All that the newest checkpoint in `folder` holds, flat, tensors whole; and the position and
    small states next to.
    """
    newest = Lock(folder / "checkpoints").find_newest()
    assert newest is not None, "there is no checkpoint"
    buffer = io.BytesIO()
    dcp_to_torch_save(newest.path, buffer)  # type: ignore[arg-type]  # torch.save's path, which may be a file
    buffer.seek(0)
    flat, _ = flatten_state_dict(torch.load(buffer, weights_only=True))
    extra = json.loads((newest.path / "state.json").read_text())["state"]
    return {**flat, **{name: extra[name] for name in ("step", "samples_seen", "extras")}}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not the same bitwise."""
    wrong = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        same = (
            one.dtype == other.dtype and torch.equal(one, other)
            if isinstance(one, Tensor)
            else one == other
        )
        if not same:
            wrong.append(name)
    return wrong


def go_through(folder: Path, strategy: str, size: int, *, generation: int) -> None:
    """Train under a strategy to the end of `STATE`; a run that is there already is taken over and
    saved.
    """
    (folder / "checkpoints/DONE").unlink(missing_ok=True)
    train_here(
        document("gpt", strategy, "fp32", **layout(strategy, size), **STATE),
        folder,
        size,
        generation=generation,
    )
    newest = Lock(folder / "checkpoints").find_newest()
    assert newest is not None
    assert newest.path.name == f"step-00000003-e{generation}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs saved by each strategy, as they are asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, strategy: str) -> Path:
            self[strategy] = tmp_path_factory.mktemp(strategy)
            go_through(self[strategy], strategy, WRITERS.get(strategy, 2), generation=1)
            return self[strategy]

    return Runs()


@pytest.mark.sampled
def test_a_state_goes_through_every_strategy_and_stays_the_same_to_the_bit(tmp_path: Path) -> None:
    go_through(tmp_path, "ddp", 2, generation=1)
    before = state_of(tmp_path)
    assert {"step", "exp_avg", "exp_avg_sq"} <= {
        name.rsplit(".", 1)[-1] for name in before if name.startswith("optimizer.state")
    }
    way = [
        ("fsdp", 3),
        ("tensor", 2),
        ("hsdp", 2),
        ("pipeline", 2),
        (OFFLOADED, 2),
        ("data_parallel", 1),
        ("ddp", 1),
    ]
    assert {strategy for strategy, _ in way} == set(STRATEGIES)
    for generation, (strategy, size) in enumerate(way, start=2):
        go_through(tmp_path, strategy, size, generation=generation)
        assert differences(state_of(tmp_path), before) == [], f"after {strategy} on {size} ranks"


@pytest.mark.chaos
@pytest.mark.wide
@pytest.mark.parametrize(
    ("first", "then", "size"),
    [
        (first, then, size)
        for first in STRATEGIES
        for then in STRATEGIES
        for size in READERS.get(then, (1, 3))
    ],
)
def test_each_strategy_takes_over_the_state_of_each_other(
    first: str, then: str, size: int, saved: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(saved[first], tmp_path, dirs_exist_ok=True)
    before = state_of(tmp_path)
    go_through(tmp_path, then, size, generation=2)
    assert differences(state_of(tmp_path), before) == []

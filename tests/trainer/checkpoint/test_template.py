"""A state that is made from what a checkpoint has: on every rank, from a shared folder and from
folders of the nodes' own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.reader import LoadedCheckpoint, SavedIndex
from kdist_trainer.config import Checkpointing
from kdist_trainer.errors import CheckpointMismatchError
from tests.trainer.checkpoint.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes


def open_store(root: Path, rank: Rank) -> CheckpointManager:
    config = Checkpointing(mode="blocking")
    return CheckpointManager(root, world=rank, run_id="run-1", config=config, job={})


def save_two(rank: Rank, root: Path, shared: bool) -> None:
    folder = root if shared else root / str(rank.rank)
    store = open_store(folder, rank)
    for step, width in ((1, 2), (2, 3)):
        tensors = {"model": {"w": torch.full((width,), float(step))}, "notes": (step,)}
        store.save(tensors, {"step": step, "width": width}, step=step)
    store.close()


def load_by_template(rank: Rank, root: Path, shared: bool) -> tuple[int, int, list[float], Any]:
    """(step that `peek` sees, step that is loaded, the tensor, the value)."""
    store = open_store(root if shared else root / str(rank.rank), rank)
    peeked = store.peek()
    assert peeked is not None
    made: dict[str, Any] = {}

    def make(found: LoadedCheckpoint, index: SavedIndex) -> dict[str, Any]:
        entry = index["model.w"]
        assert isinstance(entry, TensorStorageMetadata)
        assert list(entry.size) == [found.state["width"]]
        made.clear()
        made.update({"model": {"w": torch.zeros(entry.size)}, "notes": None})
        return made

    state = store.load(make, fingerprint="")
    assert state is not None
    store.close()
    return peeked.manifest.step, state["step"], made["model"]["w"].tolist(), made["notes"]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.sampled
def test_a_template_gets_the_shape_of_the_checkpoint_that_is_tried(
    tmp_path: Path, shared: bool
) -> None:
    root = tmp_path / "checkpoints"
    run_ranks(2, save_two, tmp_path, root, shared)
    for found in run_ranks(2, load_by_template, tmp_path, root, shared, generation=2):
        assert found == (2, 2, [2.0] * 3, (2,))
    for newest in root.rglob("step-00000002-e1/*.distcp"):
        newest.write_bytes(newest.read_bytes()[:-40] + bytes(40))
    for found in run_ranks(2, load_by_template, tmp_path, root, shared, generation=3):
        assert found[1:] == (1, [1.0] * 2, (1,)), "the one before has another shape"


def refuse_on_one(rank: Rank, root: Path) -> str:
    def make(_: LoadedCheckpoint, __: SavedIndex) -> dict[str, Any]:
        if rank.rank == 1:
            raise CheckpointMismatchError("not on rank 1")
        return {"model": {"w": torch.zeros(3)}, "notes": None}

    try:
        open_store(root, rank).load(make, fingerprint="")
    except CheckpointMismatchError as error:
        return str(error)
    return "loaded"


def test_what_one_rank_refuses_all_ranks_raise(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run_ranks(2, save_two, tmp_path, root, True)
    assert run_ranks(2, refuse_on_one, tmp_path, root, generation=2) == ["not on rank 1"] * 2

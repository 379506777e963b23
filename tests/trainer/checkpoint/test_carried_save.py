"""A save that one rank writes alone, while its group saves too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from kdist_trainer.checkpoint.manifest import read_manifest
from tests.patience import soon
from tests.trainer.checkpoint.ranks import Rank, run_ranks
from tests.trainer.checkpoint.states import (
    load,
    make_state,
    open_store,
    position,
    resumable_step,
    save,
)

pytestmark = pytest.mark.processes


def carry_and_save(rank: Rank, root: Path) -> bool:
    """Rank 1 writes step 1 alone, then all save step 2; returns whether that has succeeded."""
    store = open_store(root, rank)
    load(store)
    record = [store.lock_record]
    dist.broadcast_object_list(record)
    if rank.rank == 1:
        own = store.carry(make_state(1), position(1), step=1)
        assert record[0] is not None
        own.attach(record[0])
        assert soon(lambda: own.result is not None, seconds=60)
        assert own.result is not None
        assert own.result.ok
        assert own.drop(), "it is committed already"
    dist.barrier()
    return save(store, 2).ok


def save_elsewhere(rank: Rank, root: Path) -> bool:
    """Save step 1, of which rank 1 writes its part to another folder."""
    store = open_store(root, rank)
    load(store)
    if rank.rank == 1:
        store._new_folder("step-00000001-e1")
    return save(store, 1).ok


def test_the_next_save_of_the_group_has_the_files_of_all_ranks(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert run_ranks(2, carry_and_save, tmp_path, root) == [True, True]
    for step in (1, 2):
        (found,) = root.glob(f"step-{step:08}-e?")
        assert read_manifest(found).step == step
    assert resumable_step(root) == 2


def test_a_checkpoint_that_lacks_the_files_of_a_rank_is_not_committed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert run_ranks(2, save_elsewhere, tmp_path, root) == [False, False]
    assert not list(root.glob("step-????????-e?"))

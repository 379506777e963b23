"""Saves that a lost rank has cut are counted, also by the groups after a restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.commit import CUT_EVENT, count_cuts
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.storage import Operation, observed
from tests.trainer.checkpoint.ranks import Rank, run_ranks
from tests.trainer.checkpoint.states import make_state, open_store, position, save

pytestmark = pytest.mark.processes


def die(operation: Operation) -> None:
    if operation.name == "fsync" and operation.path.suffix == ".distcp":
        os.kill(os.getpid(), signal.SIGKILL)


def start_again(rank: Rank, root: Path, step: int, dying: int | None) -> int:
    """Open the folder, and begin a save in which rank `dying` is killed; returns the cuts before
    it.
    """
    store = open_store(root, rank)
    if dying is not None and rank.rank == dying:
        with observed(die):
            store.save(make_state(step), position(step), step=step)
            store.wait()
    elif dying is not None:
        store.save(make_state(step), position(step), step=step)
        store.wait()
    return store.cuts


def cut(root: Path, folder: Path, *, generation: int, dying: int) -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, start_again, folder, root, generation, dying, generation=generation)


@pytest.mark.sampled
def test_cuts_are_counted_over_restarts_whichever_rank_dies_until_a_commit(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    cut(root, tmp_path, generation=1, dying=0)
    assert CheckpointDirectory(root).temporary(), "rank 0 has left its files"
    assert run_ranks(2, start_again, tmp_path, root, 2, None, generation=2) == [1, 1]
    assert not CheckpointDirectory(root).temporary()
    cut(root, tmp_path, generation=3, dying=1)
    assert run_ranks(2, start_again, tmp_path, root, 4, None, generation=4) == [2, 2]
    assert [one["step"] for one in RunLedger(root).events() if one["event"] == CUT_EVENT] == [1, 3]
    run_ranks(2, save_one, tmp_path, root, generation=5)
    assert run_ranks(2, start_again, tmp_path, root, 6, None, generation=6) == [0, 0]


def save_one(rank: Rank, root: Path) -> None:
    assert save(open_store(root, rank), 5).ok


def test_a_save_that_two_have_noted_is_one() -> None:
    noted = {"event": CUT_EVENT, "folder": "step-00000004-e1.tmp-a-1"}
    assert count_cuts([noted, noted]) == 1
    assert count_cuts([noted, {"event": "commit", "step": 5}]) == 0

"""The lock: a later group takes over at once, another run does not, and who was superseded brings
nothing to light.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist_trainer.checkpoint.layout import Checkpoint, name_of
from kdist_trainer.checkpoint.lock import Lock, LockLostError
from kdist_trainer.errors import CheckpointMismatchError


def test_a_higher_epoch_of_the_same_run_takes_over_at_once(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire(run_id="r", epoch=1)
    second.acquire(run_id="r", epoch=2)
    second.check()
    with pytest.raises(LockLostError, match="epoch 2 has taken it over"):
        first.check()


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_group_that_comes_late_with_an_old_or_equal_epoch_is_turned_away(
    tmp_path: Path, epoch: int
) -> None:
    holder = Lock(tmp_path)
    holder.acquire(run_id="r", epoch=2)
    with pytest.raises(LockLostError):
        Lock(tmp_path).acquire(run_id="r", epoch=epoch)
    holder.check()


def test_another_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    holder = Lock(tmp_path)
    holder.acquire(run_id="theirs", epoch=5)
    with pytest.raises(CheckpointMismatchError, match=r"belong to run theirs.*--take-over"):
        Lock(tmp_path).acquire(run_id="ours", epoch=6)
    holder.check()


def test_another_run_may_take_over_when_reported_to_and_epochs_go_on_growing(
    tmp_path: Path,
) -> None:
    holder = Lock(tmp_path)
    holder.acquire(run_id="theirs", epoch=5)
    assert Lock(tmp_path).acquire(run_id="ours", epoch=1, take_over=True).epoch == 6
    with pytest.raises(LockLostError):
        holder.check()


def test_a_released_folder_is_free_for_any_run(tmp_path: Path) -> None:
    holder = Lock(tmp_path)
    holder.acquire(run_id="theirs", epoch=5)
    holder.release()
    with pytest.raises(LockLostError):
        holder.check()
    assert Lock(tmp_path).acquire(run_id="ours", epoch=1).epoch == 6


def test_who_was_superseded_cannot_release_or_change_the_lock_of_another(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire(run_id="r", epoch=1)
    second.acquire(run_id="r", epoch=2)
    first.release()
    second.check()
    with pytest.raises(LockLostError):
        first.set_base(None)
    last = second.last()
    assert last is not None
    assert (last.epoch, last.released) == (2, False)


def test_a_claim_that_a_crash_left_without_content_still_counts_as_an_epoch(tmp_path: Path) -> None:
    Lock(tmp_path).acquire(run_id="theirs", epoch=1)
    (tmp_path / "lock" / "e00000002.json").write_bytes(b"")
    with pytest.raises(LockLostError):
        Lock(tmp_path).acquire(run_id="theirs", epoch=2)
    with pytest.raises(CheckpointMismatchError):
        Lock(tmp_path).acquire(run_id="ours", epoch=3)
    Lock(tmp_path).acquire(run_id="theirs", epoch=3)


def test_checkpoints_that_a_superseded_writer_brings_in_late_do_not_count(tmp_path: Path) -> None:
    def checkpoint(step: int, epoch: int) -> Checkpoint:
        return Checkpoint(step, epoch, tmp_path / name_of(step, epoch))

    before, late, own = checkpoint(50, 1), checkpoint(100, 1), checkpoint(60, 2)
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire(run_id="r", epoch=1)
    first.set_base(None)
    assert first.valid([late, before]) == [late, before]
    second.acquire(run_id="r", epoch=2)
    assert second.valid([late, before]) == [late, before], (
        "until the new group has chosen, whatever is there may be chosen"
    )
    second.set_base(before)
    assert second.valid([own, late, before]) == [own, before]
    third = Lock(tmp_path)
    third.acquire(run_id="r", epoch=3)
    assert third.valid([own, late, before]) == [own, before], (
        "the choice of the second group binds the third"
    )
    third.set_base(own)
    assert third.valid([own, late, before]) == [own, before], (
        "and so it does when the third has chosen another one"
    )


def test_old_claims_are_cleared_away(tmp_path: Path) -> None:
    for epoch in range(1, 12):
        lock = Lock(tmp_path)
        lock.acquire(run_id="r", epoch=epoch)
        lock.set_base(None)
    assert len(list((tmp_path / "lock").iterdir())) == 3
    lock.check()

"""The lock: a later group takes over at once, another run does not, and who was superseded brings
nothing to light.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from kdist_trainer.checkpoint.lock import Lock, LockLostError
from kdist_trainer.checkpoint.manifest import Checkpoint
from kdist_trainer.checkpoint.storage import Operation, observed
from kdist_trainer.errors import CheckpointMismatchError
from kdist_trainer.formats import checkpoint_name


def test_a_later_generation_of_the_same_run_takes_over_at_once(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire(run_id="r", generation=1)
    second.acquire(run_id="r", generation=2)
    second.check()
    with pytest.raises(LockLostError, match="epoch 2 has taken it over"):
        first.check()


@pytest.mark.parametrize("former", [0, 5])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_group_that_comes_late_is_refused_also_where_another_run_was_before(
    tmp_path: Path, former: int, generation: int
) -> None:
    use(tmp_path, generations=former)
    holder = Lock(tmp_path)
    holder.acquire(run_id="r", generation=2)
    with pytest.raises(LockLostError, match="generation 2 of run r holds"):
        Lock(tmp_path).acquire(run_id="r", generation=generation)
    holder.check()


def test_a_lock_that_was_written_but_not_synced_is_taken_by_the_next_attempt(
    tmp_path: Path,
) -> None:
    lock, failures = Lock(tmp_path), [1]

    def fail_once(operation: Operation) -> None:
        if operation.name == "fsync_folder" and operation.path.name == "lock" and failures:
            failures.pop()
            raise OSError(errno.EIO, "Input/output error")

    with observed(fail_once):
        with pytest.raises(OSError, match="Input/output"):
            lock.acquire(run_id="r", generation=3)
        assert lock.mine is None
        assert lock.acquire(run_id="r", generation=3).generation == 3
    lock.check()
    with pytest.raises(LockLostError):
        Lock(tmp_path).acquire(run_id="r", generation=3)


def use(root: Path, *, generations: int) -> None:
    """Have another run use the folder, and release it."""
    for generation in range(1, generations + 1):
        lock = Lock(root)
        lock.acquire(run_id="theirs", generation=generation)
        lock.set_base(None)
        if generation == generations:
            lock.release()


def test_a_run_restarts_at_once_in_the_folder_of_another_that_had_more_generations(
    tmp_path: Path,
) -> None:
    use(tmp_path, generations=5)
    for generation, epoch in ((1, 6), (2, 7), (4, 8), (20, 20)):
        lock = Lock(tmp_path)
        assert lock.acquire(run_id="ours", generation=generation).epoch == epoch
        lock.check()


def test_a_generation_that_has_released_the_folder_may_lock_it_again(tmp_path: Path) -> None:
    use(tmp_path, generations=5)
    for _ in range(2):
        lock = Lock(tmp_path)
        assert lock.acquire(run_id="ours", generation=1).epoch == 6
        lock.release()


def test_a_record_of_an_earlier_version_says_its_generation_by_its_epoch(tmp_path: Path) -> None:
    Lock(tmp_path).acquire(run_id="r", generation=3)
    record = tmp_path / "lock" / "e00000003.json"
    document = json.loads(record.read_text())
    del document["generation"]
    record.write_text(json.dumps(document))
    with pytest.raises(LockLostError, match="generation 3 of run r"):
        Lock(tmp_path).acquire(run_id="r", generation=3)
    assert Lock(tmp_path).acquire(run_id="r", generation=4).epoch == 4


def test_another_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    holder = Lock(tmp_path)
    holder.acquire(run_id="theirs", generation=5)
    with pytest.raises(CheckpointMismatchError, match=r"belong to run theirs.*--take-over"):
        Lock(tmp_path).acquire(run_id="ours", generation=6)
    holder.check()


def test_another_run_may_take_over_when_reported_to_and_epochs_go_on_growing(
    tmp_path: Path,
) -> None:
    holder = Lock(tmp_path)
    holder.acquire(run_id="theirs", generation=5)
    assert Lock(tmp_path).acquire(run_id="ours", generation=1, take_over=True).epoch == 6
    with pytest.raises(LockLostError):
        holder.check()


def test_a_released_folder_is_free_for_any_run(tmp_path: Path) -> None:
    holder = Lock(tmp_path)
    holder.acquire(run_id="theirs", generation=5)
    holder.release()
    with pytest.raises(LockLostError):
        holder.check()
    assert Lock(tmp_path).acquire(run_id="ours", generation=1).epoch == 6


def test_who_was_superseded_cannot_release_or_change_the_lock_of_another(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire(run_id="r", generation=1)
    second.acquire(run_id="r", generation=2)
    first.release()
    second.check()
    with pytest.raises(LockLostError):
        first.set_base(None)
    last = second.last()
    assert last is not None
    assert (last.epoch, last.released) == (2, False)


def test_a_claim_that_a_crash_left_without_content_still_counts_as_an_epoch(tmp_path: Path) -> None:
    Lock(tmp_path).acquire(run_id="theirs", generation=1)
    (tmp_path / "lock" / "e00000002.json").write_bytes(b"")
    with pytest.raises(LockLostError):
        Lock(tmp_path).acquire(run_id="theirs", generation=2)
    with pytest.raises(CheckpointMismatchError):
        Lock(tmp_path).acquire(run_id="ours", generation=3)
    assert Lock(tmp_path).acquire(run_id="theirs", generation=3).epoch == 3


def test_checkpoints_that_a_superseded_writer_brings_in_late_do_not_count(tmp_path: Path) -> None:
    def checkpoint(step: int, epoch: int) -> Checkpoint:
        return Checkpoint(step, epoch, tmp_path / checkpoint_name(step, epoch))

    before, late, own = checkpoint(50, 1), checkpoint(100, 1), checkpoint(60, 2)
    first, second = Lock(tmp_path), Lock(tmp_path)
    first.acquire(run_id="r", generation=1)
    first.set_base(None)
    assert first.valid([late, before]) == [late, before]
    second.acquire(run_id="r", generation=2)
    assert second.valid([late, before]) == [late, before], (
        "until the new group has chosen, whatever is there may be chosen"
    )
    second.set_base(before)
    assert second.valid([own, late, before]) == [own, before]
    third = Lock(tmp_path)
    third.acquire(run_id="r", generation=3)
    assert third.valid([own, late, before]) == [own, before], (
        "the choice of the second group binds the third"
    )
    third.set_base(own)
    assert third.valid([own, late, before]) == [own, before], (
        "and so it does when the third has chosen another one"
    )


def test_old_claims_are_cleared_away(tmp_path: Path) -> None:
    for generation in range(1, 12):
        lock = Lock(tmp_path)
        lock.acquire(run_id="r", generation=generation)
        lock.set_base(None)
    assert len(list((tmp_path / "lock").iterdir())) == 3
    lock.check()

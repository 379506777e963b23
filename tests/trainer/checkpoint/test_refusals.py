"""Saves that the disk, another group or another run refuses: counted, told, cleaned up, and the
training goes on.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.checkpoint import storage
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.lock import LockLostError
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.storage import Operation
from kdist_trainer.errors import CheckpointMismatchError, StorageError
from tests.small_disk import fill, small_disk
from tests.trainer.checkpoint.states import (
    load,
    make_state,
    open_store,
    opened,
    position,
    resumable_step,
    save,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_a_ledger_that_cannot_be_synced_keeps_the_checkpoint_from_being_committed(
    root: Path,
) -> None:
    store = opened(root)
    results: list[SaveResult] = []
    store.on_result = results.append

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    store.save(make_state(1), position(1), step=1, before_commit=refuse)
    assert [(one.ok, one.cause) for one in results] == [(False, "eio")]
    assert CheckpointDirectory(root).committed() == []
    assert CheckpointDirectory(root).temporary() == []


def test_a_required_save_is_tried_twice_and_then_raises(root: Path) -> None:
    store = opened(root, blocking=False)
    results: list[SaveResult] = []
    store.on_result = results.append
    attempts: list[int] = []

    def refuse_once() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError(28, "No space left on device")

    store.save(make_state(1), position(1), step=1, before_commit=refuse_once, required=True)
    assert [one.ok for one in results] == [False, True]
    assert resumable_step(root) == 1

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    other = open_store(root, generation=9)
    load(other)
    with pytest.raises(StorageError, match="step 2 could not be saved"):
        other.save(make_state(2), position(2), step=2, before_commit=refuse, required=True)
    assert resumable_step(root) == 1


def test_a_rename_that_could_not_be_synced_is_made_again_by_the_next_try(root: Path) -> None:
    store = opened(root)
    failed: list[Operation] = []

    def refuse(one: Operation) -> None:
        if one.name == "fsync_folder" and one.path == root and not failed:
            failed.append(one)
            raise OSError(5, "Input/output error")

    with storage.observed(refuse):
        store.save(make_state(1), position(1), step=1, required=True)
    assert failed
    assert [one.step for one in CheckpointDirectory(root).committed()] == [1]
    assert resumable_step(root) == 1


def test_a_group_that_was_superseded_learns_it_from_its_next_save(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    later = open_store(root, generation=2)
    with pytest.raises(LockLostError):
        save(store, 2)
    assert load(later) == 1
    store.close()
    assert save(later, 2).ok, (
        "closing the superseded store does not touch the lock of the later one"
    )


def test_another_run_is_refused_until_the_first_lets_go(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    with pytest.raises(CheckpointMismatchError, match="--take-over"):
        open_store(root, run_id="run-2", generation=5)
    store.close()
    store.close()
    other = open_store(root, run_id="run-2")
    assert other.epoch == 2
    assert load(other) == 1
    assert open_store(root, run_id="run-3", take_over=True).epoch == 3


def test_a_folder_that_cannot_be_written_is_a_storage_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        open_store(tmp_path / "file" / "checkpoints")


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=1)


def test_a_full_disk_fails_the_save_and_nothing_else(disk: Path) -> None:
    store = opened(disk / "checkpoints", blocking=False)
    assert save(store, 1).ok
    ballast = fill(disk)
    result = save(store, 2)
    assert (result.ok, result.cause) == (False, "enospc")
    assert CheckpointDirectory(store.directory.root).temporary() == []
    assert [one.step for one in CheckpointDirectory(store.directory.root).committed()] == [1]
    with pytest.raises(StorageError, match="No space left"):
        store.save(make_state(3), position(3), step=3, required=True)
    ballast.unlink()
    assert save(store, 4).ok
    assert resumable_step(disk / "checkpoints") == 4


def test_a_folder_that_vanishes_is_like_a_lost_lock(root: Path) -> None:
    store = opened(root)
    shutil.rmtree(root)
    with pytest.raises(LockLostError):
        save(store, 1)


@pytest.mark.parametrize(
    ("operation", "reported"),
    [("rename", "rename a folder"), ("replace", "replace a file"), ("fsync", "write and fsync")],
)
def test_storage_that_lacks_what_saves_need_is_refused_before_the_first_step(
    root: Path, operation: str, reported: str
) -> None:
    def refuse(one: Operation) -> None:
        if one.name == operation and ".tmp-probe" in str(one.path):
            raise OSError(errno.ENOTSUP, "Operation not supported")

    with (
        storage.observed(refuse),
        pytest.raises(
            CheckpointMismatchError,
            match=rf"cannot {reported}.*Operation not supported.*use a volume",
        ),
    ):
        open_store(root)
    assert list(root.iterdir()) == [], "nothing is left behind"


def test_ranks_that_continue_in_place_try_the_storage_only_with_what_they_need_at_once(
    root: Path,
) -> None:
    tried: list[Operation] = []
    with storage.observed(tried.append):
        store = open_store(root, is_known=True)
    assert [one for one in tried if one.name == "create"], "each still looks for rank 0's file"
    assert not [one for one in tried if ".tmp-probe" in str(one.path)]
    assert save(store, 1).ok


def test_storage_that_is_full_at_the_start_may_have_room_at_the_next_try(root: Path) -> None:
    def refuse(one: Operation) -> None:
        if one.name == "write" and "probe" in str(one.path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with storage.observed(refuse), pytest.raises(StorageError, match="No space left"):
        open_store(root)
    assert load(open_store(root)) is None

"""The store as a training loop uses it: what saving beside the training does, waits for, keeps, counts and refuses."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.checkpoint import files
from kdist_trainer.checkpoint.checkpointer import CheckpointStore, SaveResult
from kdist_trainer.checkpoint.files import Operation
from kdist_trainer.checkpoint.layout import CheckpointDirectory
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Superseded
from kdist_trainer.checkpoint.manifest import read_manifest
from kdist_trainer.failure import Mismatch, StorageProblem
from tests.trainer.checkpoint.states import digest_of, load, make_state, open_store, position, resumable_step, save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def opened(root: Path, *, keep: int = 3, blocking: bool = True) -> CheckpointStore:
    store = open_store(root, keep=keep, mode="blocking" if blocking else "async")
    assert load(store) is None
    return store


class Gate:
    """Holds the writing thread at its first operation until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, _operation: Operation) -> None:
        self.reached.set()
        assert self.opened.wait(60)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_saving_beside_the_training_writes_the_same_bytes_as_saving_in_its_place(tmp_path: Path) -> None:
    contents = []
    for blocking in (True, False):
        root = tmp_path / str(blocking)
        store = opened(root, blocking=blocking)
        assert save(store, 5).ok
        store.close()
        contents.append(content_of(root / "step-00000005-e1"))
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == [".metadata", "__0_0.distcp", "manifest.json", "state.json"]


def test_the_training_goes_on_while_the_save_is_written_and_what_it_changes_is_not_saved(root: Path) -> None:
    store = opened(root, blocking=False)
    results: list[SaveResult] = []
    store.on_result = results.append
    state, gate = make_state(1), Gate()
    with files.observed(gate):
        begun = store.save(state, position(1), step=1)
        assert not begun.waited
        store.poll()
        assert results == [], "nothing is told before it has happened"
        for tensor in state["model"].values():
            tensor.zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 123.0
        gate.opened.set()
        store.wait()
    assert [(one.step, one.ok) for one in results] == [(1, True)]
    assert results[0].visible_seconds < results[0].total_seconds
    assert resumable_step(root) == 1


def test_the_next_save_waits_its_turn_and_says_so(root: Path) -> None:
    store = opened(root, blocking=False)
    gate = Gate()
    order: list[str] = []
    store.on_result = lambda result: order.append(f"told {result.step}")
    with files.observed(gate):
        store.save(make_state(1), position(1), step=1)
        assert gate.reached.wait(60)
        threading.Timer(0.2, gate.opened.set).start()
        second = store.save(make_state(2), position(2), step=2)
        order.append("second begun")
        store.wait()
    assert second.waited
    assert second.visible_seconds > 0.1
    assert order == ["told 1", "second begun", "told 2"]
    assert [one.step for one in CheckpointDirectory(root).committed()] == [2, 1]


def test_before_commit_runs_after_the_files_and_before_the_name(root: Path) -> None:
    store = opened(root)
    seen: list[list[str]] = []

    def look() -> None:
        (folder,) = root.glob("step-*")
        seen.append([folder.name.partition(".")[2][:3], *sorted(path.name for path in folder.iterdir())])

    store.save(make_state(1), position(1), step=1, before_commit=look)
    assert seen == [["tmp", ".metadata", "__0_0.distcp", "manifest.json", "state.json"]]


def test_a_ledger_that_cannot_be_synced_keeps_the_checkpoint_from_being_committed(root: Path) -> None:
    store = opened(root)
    results: list[SaveResult] = []
    store.on_result = results.append

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    store.save(make_state(1), position(1), step=1, before_commit=refuse)
    assert [(one.ok, one.cause) for one in results] == [(False, "eio")]
    assert CheckpointDirectory(root).committed() == []
    assert CheckpointDirectory(root).temporary() == []


def test_the_manifest_says_where_a_checkpoint_comes_from(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    save(store, 2)
    manifest = read_manifest(root / "step-00000002-e1")
    assert (manifest.parent, manifest.samples_seen, manifest.world_size) == ("step-00000001-e1", 64, 1)
    assert (manifest.run_id, manifest.config_digest) == ("run-1", "config-1")
    assert set(manifest.versions) == {"kdist", "torch", "python"}


def test_commits_stand_in_the_ledger(root: Path) -> None:
    store = opened(root)
    result = save(store, 4)
    (event,) = [one for one in RunLedger(root).events() if one["event"] == "commit"]
    assert (event["step"], event["bytes"]) == (4, result.nbytes)
    assert event["seconds"] == pytest.approx(result.total_seconds, abs=0.1)


@pytest.mark.parametrize("keep", [1, 2])
def test_so_many_checkpoints_are_kept_and_older_ones_go(root: Path, keep: int) -> None:
    store = opened(root, keep=keep)
    for step in range(1, 6):
        assert save(store, step).ok
    assert [one.step for one in CheckpointDirectory(root).committed()] == [5, 4][:keep]
    assert CheckpointDirectory(root).temporary() == []


def test_the_checkpoint_that_latest_names_is_never_pruned(root: Path) -> None:
    store = opened(root, keep=1)
    save(store, 1)
    # A later group could not yet write LATEST when it pruned: what it names must still be there.
    original = store.directory.write_latest
    store.directory.write_latest = lambda _name: None  # type: ignore[method-assign]
    save(store, 2)
    store.directory.write_latest = original  # type: ignore[method-assign]
    assert {one.step for one in CheckpointDirectory(root).committed()} == {2, 1}


def test_litter_of_dead_groups_is_cleared_but_not_that_of_a_later_one(root: Path) -> None:
    root.mkdir()
    for name in ("step-00000001-e1.tmp-a-1", "step-00000001-e2.tmp-b-1", "step-00000009-e7.tmp-c-1"):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    open_store(root, generation=3)
    assert [path.name for path in root.glob("step-*")] == ["step-00000009-e7.tmp-c-1"]


def test_a_step_that_this_group_has_committed_is_not_written_again(root: Path) -> None:
    store = opened(root)
    assert save(store, 3).ok
    before = content_of(root / "step-00000003-e1")
    operations: list[Operation] = []
    with files.observed(operations.append):
        assert save(store, 3).ok
    assert operations == []
    assert content_of(root / "step-00000003-e1") == before


def test_the_final_save_is_committed_and_noted_as_done_when_it_returns(root: Path) -> None:
    store = opened(root, blocking=False)
    store.save(make_state(7), position(7), step=7, final={"outcome": "done", "metrics": {"accuracy": 0.5}})
    assert CheckpointDirectory(root).done() == {
        "run_id": "run-1",
        "step": 7,
        "checkpoint": "step-00000007-e1",
        "outcome": "done",
        "metrics": {"accuracy": 0.5},
    }
    assert resumable_step(root) == 7


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
    with pytest.raises(StorageProblem, match="step 2 could not be saved"):
        other.save(make_state(2), position(2), step=2, before_commit=refuse, required=True)
    assert resumable_step(root) == 1


def test_a_rename_that_could_not_be_synced_is_made_again_by_the_next_try(root: Path) -> None:
    store = opened(root)
    failed: list[Operation] = []

    def refuse(one: Operation) -> None:
        if one.name == "fsync_folder" and one.path == root and not failed:
            failed.append(one)
            raise OSError(5, "Input/output error")

    with files.observed(refuse):
        store.save(make_state(1), position(1), step=1, required=True)
    assert failed
    assert [one.step for one in CheckpointDirectory(root).committed()] == [1]
    assert resumable_step(root) == 1


def test_a_group_that_was_superseded_learns_it_from_its_next_save(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    later = open_store(root, generation=2)
    with pytest.raises(Superseded):
        save(store, 2)
    assert load(later) == 1
    store.close()
    assert save(later, 2).ok, "closing the superseded store does not touch the lock of the later one"


def test_another_run_is_refused_until_the_first_lets_go(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    with pytest.raises(Mismatch, match="--take-over"):
        open_store(root, run_id="run-2", generation=5)
    store.close()
    store.close()
    other = open_store(root, run_id="run-2")
    assert other.epoch == 2
    assert load(other) == 1
    assert open_store(root, run_id="run-3", take_over=True).epoch == 3


def test_a_folder_that_cannot_be_written_is_a_storage_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageProblem, match="cannot write"):
        open_store(tmp_path / "file" / "checkpoints")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root; refused writes are tested with strace and resource limits as well")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_fails_the_save_and_nothing_else(small_disk: Path) -> None:
    store = opened(small_disk / "checkpoints", blocking=False)
    assert save(store, 1).ok
    ballast = small_disk / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], check=False, capture_output=True)
    result = save(store, 2)
    assert (result.ok, result.cause) == (False, "enospc")
    assert CheckpointDirectory(store.directory.root).temporary() == []
    assert [one.step for one in CheckpointDirectory(store.directory.root).committed()] == [1]
    with pytest.raises(StorageProblem, match="No space left"):
        store.save(make_state(3), position(3), step=3, required=True)
    ballast.unlink()
    assert save(store, 4).ok
    assert resumable_step(store.directory.root) == 4


def test_a_folder_that_vanishes_is_like_a_lost_lock(root: Path) -> None:
    store = opened(root)
    shutil.rmtree(root)
    with pytest.raises(Superseded):
        save(store, 1)


def test_buffers_are_used_again_from_one_save_to_the_next(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    before = {name: tensor.data_ptr() for name, tensor in store._stager._buffers.items()}
    save(store, 2)
    assert {name: tensor.data_ptr() for name, tensor in store._stager._buffers.items()} == before


def test_a_state_whose_shapes_change_is_staged_anew(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    grown = make_state(2, width=16)
    store.save(grown, position(2), step=2)
    tensors = make_state(999, width=16)
    assert open_store(root, generation=2).load(tensors, fingerprint="data-1") == position(2)
    assert digest_of(tensors) == digest_of(grown)


def test_files_are_synced_even_where_dcp_would_forget(root: Path) -> None:
    store = opened(root)
    operations: list[Operation] = []
    with files.observed(operations.append):
        save(store, 1)
    for created in [one.path for one in operations if one.name == "create"]:
        last_write = max(at for at, one in enumerate(operations) if one.name == "write" and one.path == created)
        assert any(one.name == "fsync" and one.path == created for one in operations[last_write:]), (
            f"{created.name} is not synced"
        )
    assert root.stat().st_mode & 0o777 == 0o700

"""The store as a training loop uses it: what saving next to the training does, waits for, keeps,
counts and refuses.
"""

from __future__ import annotations

import math
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kdist_trainer.checkpoint import commit, storage
from kdist_trainer.checkpoint.__main__ import describe
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.checkpoint.lock import Lock
from kdist_trainer.checkpoint.manifest import MANIFEST, CheckpointDirectory, read_manifest
from kdist_trainer.checkpoint.reader import inspect
from kdist_trainer.checkpoint.storage import Operation
from kdist_trainer.config import Best, Every, Keep
from kdist_trainer.errors import CheckpointMismatchError
from tests.trainer.checkpoint.states import (
    digest_of,
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


def test_saving_next_to_the_training_writes_the_same_bytes_as_saving_in_its_place(
    tmp_path: Path,
) -> None:
    contents = []
    for blocking in (True, False):
        root = tmp_path / str(blocking)
        store = opened(root, blocking=blocking)
        assert save(store, 5).ok
        store.close()
        contents.append(content_of(root / "step-00000005-e1"))
    assert contents[0] == contents[1]
    assert sorted(contents[0]) == [".metadata", "__0_0.distcp", "manifest.json", "state.json"]


def test_the_training_goes_on_while_the_save_is_written_and_what_it_changes_is_not_saved(
    root: Path,
) -> None:
    store = opened(root, blocking=False)
    results: list[SaveResult] = []
    store.on_result = results.append
    state, where, gate = make_state(1), position(1), Gate()
    with storage.observed(gate):
        begun = store.save(state, where, step=1)
        assert not begun.waited
        store.poll()
        assert results == [], "nothing is told before it has happened"
        for tensor in state["model"].values():
            tensor.zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 123.0
        where["samples_seen"] = 456
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
    with storage.observed(gate):
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
        seen.append(
            [folder.name.partition(".")[2][:3], *sorted(path.name for path in folder.iterdir())]
        )

    store.save(make_state(1), position(1), step=1, before_commit=look)
    assert seen == [["tmp", ".metadata", "__0_0.distcp", "manifest.json", "state.json"]]


def test_the_manifest_says_where_a_checkpoint_comes_from(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    save(store, 2)
    manifest = read_manifest(root / "step-00000002-e1")
    assert manifest.parent == "step-00000001-e1"
    assert manifest.samples_seen == 64
    assert manifest.world_size == 1
    assert (manifest.run_id, len(manifest.config_digest)) == ("run-1", 64)
    assert inspect(root / "step-00000002-e1").job == {"name": "config-1"}
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


@pytest.mark.parametrize(
    ("keep", "minutes", "expected"),
    [
        (3, [0, 1, 2, 3, 4], [4, 0]),
        (3, [0, 1, 5, 6, 9, 10, 11], [11, 10, 5]),
        (2, [0, 1, 5, 6], [6, 5]),
        (1, [0, 1, 5, 6], [6]),
        (3, [0, 60, 120, 180], [180, 120, 60]),  # as far apart as it is: the newest ones
    ],
)
def test_those_that_are_kept_by_a_run_that_saves_by_itself_are_five_minutes_apart(
    root: Path, keep: int, minutes: list[int], expected: list[int]
) -> None:
    store = opened(root, keep=keep, every=Every(auto=True))
    folder = CheckpointDirectory(root)
    for minute in minutes:
        path = save(store, minute + 1).path
        assert isinstance(path, Path)
        os.utime(path / MANIFEST, (60 * minute, 60 * minute))
        assert len(folder.committed()) <= keep
    assert [one.step - 1 for one in folder.committed()] == expected


def test_the_first_checkpoint_at_or_after_the_best_evaluation_is_kept_and_one_of_each_multiple(
    root: Path,
) -> None:
    best = Best(metric="accuracy", goal="max")
    store = opened(root, keep=Keep(last=1, best=best, every=10))
    ledger, listed = RunLedger(root), []
    for step, evaluated, accuracy in [
        *((3, 3, 0.5), (6, 5, 0.9), (9, 8, 0.7), (12, 12, math.nan), (15, 99, 1.0)),
        *((18, 18, 0.1), (21, 20, 0.95), (24, 23, 0.9), (33, 33, 0.95)),
    ]:
        ledger.append("evaluated", step=evaluated, metrics={"accuracy": accuracy, "loss": 0.0})
        assert save(store, step).ok
        listed.append({one["step"]: one["kept"] for one in describe(root)["checkpoints"]})
    assert [dict.fromkeys(each) for each in listed[:3]] == [
        {3: None},
        {6: None},
        {9: None, 6: None},
    ]
    assert listed[4] == {15: ["last"], 12: ["every"], 6: ["best"]}, "99 is not committed"
    assert listed[-1] == {33: ["last", "every"], 21: ["best", "every"], 12: ["every"]}


def test_the_best_checkpoint_stays_after_its_evaluation_has_left_the_ledger(root: Path) -> None:
    store = opened(root, keep=Keep(last=1, best=Best()))
    RunLedger(root).append("evaluated", step=1, metrics={"loss": 1.0})
    assert save(store, 1).ok
    events = root / "ledger" / "events.jsonl"
    kept = [line for line in events.read_bytes().splitlines() if b'"commit"' in line]
    events.write_bytes(b"\n".join(kept) + b"\n")
    for step in (2, 3):
        assert save(store, step).ok
    assert {one["step"]: one["kept"] for one in describe(root)["checkpoints"]} == {
        3: ["last"],
        1: ["best"],
    }


@pytest.mark.parametrize("error", [OSError("input/output error"), ValueError("no such number")])
def test_a_commit_is_noted_and_listed_where_it_cannot_be_told_what_is_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    store = opened(root, keep=Keep(last=1, best=Best()))
    with monkeypatch.context() as patch:
        patch.setattr(commit, "find_best", fail)
        assert save(store, 1).ok
    noted = [one for one in RunLedger(root).events() if one["event"] == "commit"]
    assert [(one["step"], "keep" in one) for one in noted] == [(1, False)]
    monkeypatch.setattr(commit, "explain_kept", fail)
    assert [one["kept"] for one in describe(root)["checkpoints"]] == [[]]


def test_the_checkpoint_that_latest_names_is_never_pruned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(root, keep=1)
    save(store, 1)
    # A later group could not yet write LATEST when it pruned: what it names must still be there.
    monkeypatch.setattr(store.directory, "write_latest", lambda _name: None)
    save(store, 2)
    assert {one.step for one in CheckpointDirectory(root).committed()} == {2, 1}


def test_old_checkpoints_go_though_every_group_is_killed_after_its_commit(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, step = commit.prune, 0

    def remove_before(directory: CheckpointDirectory, lock: Lock, **kept: Any) -> None:
        if step not in [one.step for one in directory.committed()]:
            remove(directory, lock, **kept)

    monkeypatch.setattr(commit, "prune", remove_before)
    for step in range(1, 6):
        store = open_store(root, generation=step, keep=1)
        load(store)
        assert save(store, step).ok
        store.close()
    assert [one.step for one in CheckpointDirectory(root).committed()] == [5, 4]


def test_litter_of_dead_groups_is_cleared_but_not_that_of_a_later_one(root: Path) -> None:
    root.mkdir()
    for name in (
        "step-00000001-e1.tmp-a-1",
        "step-00000001-e2.tmp-b-1",
        "step-00000009-e7.tmp-c-1",
    ):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    open_store(root, generation=3)
    assert [path.name for path in root.glob("step-*")] == ["step-00000009-e7.tmp-c-1"]


def test_files_of_a_moment_that_a_crash_left_are_cleared_once_they_are_old(root: Path) -> None:
    root.mkdir()
    for name in ("probe-0123", "LATEST.tmp-1-2", "DONE.tmp-1-2", "probe-young", "notes.txt"):
        (root / name).write_text("x")
        if name != "probe-young":
            os.utime(root / name, (0, 0))
    open_store(root)
    expected = ["notes.txt", "probe-young"]
    assert sorted(path.name for path in root.iterdir() if path.is_file()) == expected


def test_a_step_that_this_group_has_committed_is_not_written_again(root: Path) -> None:
    store = opened(root)
    assert save(store, 3).ok
    before = content_of(root / "step-00000003-e1")
    operations: list[Operation] = []
    with storage.observed(operations.append):
        assert save(store, 3).ok
    assert operations == []
    assert content_of(root / "step-00000003-e1") == before


def test_the_final_save_is_committed_and_noted_as_done_when_it_returns(root: Path) -> None:
    store = opened(root, blocking=False)
    store.save(
        make_state(7), position(7), step=7, final={"outcome": "done", "metrics": {"accuracy": 0.5}}
    )
    assert CheckpointDirectory(root).done() == {
        "run_id": "run-1",
        "step": 7,
        "checkpoint": "step-00000007-e1",
        "outcome": "done",
        "metrics": {"accuracy": 0.5},
        "job": {"name": "config-1"},
    }
    assert resumable_step(root) == 7


def test_buffers_are_used_again_from_one_save_to_the_next(root: Path) -> None:
    store = opened(root)
    save(store, 1)
    before = {name: tensor.data_ptr() for name, tensor in store._stager._buffers.items()}
    save(store, 2)
    assert {name: tensor.data_ptr() for name, tensor in store._stager._buffers.items()} == before


def test_a_state_whose_shapes_change_is_staged_again(root: Path) -> None:
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
    with storage.observed(operations.append):
        save(store, 1)
    for created in [one.path for one in operations if one.name == "create"]:
        last_write = max(
            at for at, one in enumerate(operations) if one.name == "write" and one.path == created
        )
        assert any(
            one.name == "fsync" and one.path == created for one in operations[last_write:]
        ), f"{created.name} is not synced"
    assert root.stat().st_mode & 0o777 == 0o700


def test_what_the_script_saves_meanwhile_keeps_its_checksums(tmp_path: Path) -> None:
    store = opened(tmp_path / "checkpoints")
    theirs = tmp_path / "theirs.pt"

    def save_another(operation: Operation) -> None:
        if operation.name == "write" and operation.path.suffix == ".distcp" and not theirs.exists():
            thread = threading.Thread(target=torch.save, args=(torch.ones(1000), theirs))
            thread.start()
            thread.join()

    with storage.observed(save_another):
        assert save(store, 1).ok
    torch.save(torch.ones(1000), tmp_path / "later.pt")
    for path in (theirs, tmp_path / "later.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_a_step_that_goes_back_is_refused_with_the_reason(tmp_path: Path) -> None:
    store = opened(tmp_path / "checkpoints")
    assert save(store, 10).ok
    with pytest.raises(CheckpointMismatchError, match="run is of step 10"):
        save(store, 5)
    assert save(store, 10).ok, "the same step once more changes nothing"
    store.close()
    later = open_store(tmp_path / "checkpoints", generation=2)
    assert load(later) == 10
    with pytest.raises(CheckpointMismatchError, match="step 9 is not saved"):
        save(later, 9)
    assert save(later, 11).ok


def test_a_group_that_skips_a_damaged_checkpoint_saves_the_steps_before_it(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    store = opened(root)
    assert save(store, 1).ok
    assert save(store, 4).ok
    next((root / "step-00000004-e1").glob("*.distcp")).write_bytes(b"")
    assert load(store) == 1, "as a rollback does"
    assert save(store, 3).ok
    newest = Lock(root).find_newest()
    assert newest is not None
    assert newest.step == 3

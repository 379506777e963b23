"""A save that one rank writes alone, while its group saves too, and through several groups: on a
disk, in an object store, and where the ranks do not share the folder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from kdist_trainer.checkpoint import commit
from kdist_trainer.checkpoint.commit import DROPPED
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, read_manifest
from kdist_trainer.checkpoint.storage import Operation, StoragePath, observed, remove
from kdist_trainer.object_store.store import ObjectLocation, ObjectPath, ObjectStore
from kdist_trainer.training.carrying import Carrier, Carrying
from kdist_trainer.training.checkpointing import TrainerCheckpointing
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
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server

pytestmark = pytest.mark.processes


def carry_and_save(rank: Rank, root: Path) -> bool:
    """Rank 1 writes step 1 alone, then all save step 2; returns whether that has succeeded."""
    store = open_store(root, rank)
    load(store)
    record = [store.folder.lock_record]
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


@pytest.fixture(name="root", params=["disk", "bucket"])
def make_root(tmp_path: Path, request: pytest.FixtureRequest) -> StoragePath:
    if request.param == "disk":
        return tmp_path / "checkpoints"
    root: StoragePath = request.getfixturevalue("bucket")
    return root


@pytest.fixture(name="bucket")
def make_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoragePath]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with S3Server() as server:
        location = ObjectLocation(f"s3://{BUCKET}/jobs", server.endpoint, "us-east-1")
        yield ObjectPath(ObjectStore(location)) / "run"


def test_a_save_goes_on_through_the_groups_that_its_rank_is_in(root: StoragePath) -> None:
    first = open_store(root)
    assert load(first) is None
    assert save(first, 1).ok
    own = first.carry(make_state(2), position(2), step=2)
    for generation in (2, 3):
        group = open_store(root, generation=generation, is_known=True, spared=[own.folder])
        assert own.is_in_progress, "it waits for a group"
        own.detach()
    record = group.folder.lock_record
    assert record is not None
    own.attach(record)
    done = own.wait()
    assert (done.ok, done.step, own.drop()) == (True, 2, True)
    assert done.path == root / "step-00000002-e3", "by the group that its rank is in"
    assert done.nbytes > 0
    assert save(group, 3).ok, "which cleans up before"
    assert load(open_store(root, generation=4)) == 3
    remove(CheckpointDirectory(root).committed()[0].path / "manifest.json")
    assert load(open_store(root, generation=5)) == 2, "its files are all there"


def test_a_commit_that_comes_after_the_lock_of_the_next_group_is_repeated_in_a_bucket(
    bucket: StoragePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_store(bucket)
    load(first)
    assert save(first, 1).ok
    is_held, go_on = threading.Event(), threading.Event()
    put = commit._put_manifest

    def put_late(path: Any, data: bytes) -> None:
        if path.parent.name.endswith("-e1"):
            is_held.set()
            assert go_on.wait(60)
        put(path, data)

    monkeypatch.setattr(commit, "_put_manifest", put_late)
    own = first.carry(make_state(2), position(2), step=2)
    assert first.folder.lock_record is not None
    own.attach(first.folder.lock_record)
    assert is_held.wait(60)
    own.detach()
    group = open_store(bucket, generation=2, is_known=True, spared=[own.folder])
    assert group.folder.lock_record is not None
    go_on.set()
    own.attach(group.folder.lock_record)
    assert own.wait().path == bucket / "step-00000002-e2"
    assert save(group, 3).ok, "which removes what does not count"
    remove(bucket / "step-00000003-e2" / "manifest.json")
    assert load(open_store(bucket, generation=3)) == 2, "its files are all there"


def test_a_save_that_is_dropped_or_overtaken_leaves_nothing(root: StoragePath) -> None:
    store = open_store(root)
    assert load(store) is None
    dropped = store.carry(make_state(1), position(1), step=1)
    assert not dropped.drop()
    assert dropped.wait().cause == DROPPED
    overtaken = store.carry(make_state(2), position(2), step=2)
    assert save(store, 3).ok
    assert store.folder.lock_record is not None
    overtaken.attach(store.folder.lock_record)
    assert overtaken.wait().cause == DROPPED
    assert not CheckpointDirectory(root).temporary()
    assert load(open_store(root, generation=2)) == 3


def carry_apart(rank: Rank, root: Path) -> list[Any]:
    """Which save goes on, of two that ranks without a shared folder carry, or of the one that rank
    1 does.
    """
    store = open_store(root / str(rank.rank), rank)
    carrying = Carrying(cast(TrainerCheckpointing, SimpleNamespace(manager=store)))
    assert not store.shared
    both = [Carrier(None, 5), Carrier(None, 7)]
    return [carrying.find(both), carrying.find([Carrier(), Carrier(None, 7)])]


def test_where_ranks_do_not_share_the_folder_only_rank_0_carries_a_save(tmp_path: Path) -> None:
    assert run_ranks(2, carry_apart, tmp_path, tmp_path) == [[(0, 5), None]] * 2


def hand_over(rank: Rank, root: Path) -> tuple[bool, bool]:
    """Rank 0 leaves while its storage holds the tensors of step 1; returns whether it did not wait
    for that, and whether the next group has the checkpoint.
    """
    store = open_store(root / str(rank.rank), rank, mode="async")
    load(store)
    holding, release = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if operation.name == "fsync" and operation.path.suffix == ".distcp":
            holding.set()
            release.wait(60)

    with observed(hold):
        store.save(make_state(1), position(1), step=1)
        if rank.rank:
            return store.handed_over is None, True
        assert holding.wait(60), "rank 0 writes everything"
        assert store.abandon() is None
        goes_on = store.handed_over
        assert goes_on is not None
        group = open_store(root / "0", generation=2, is_known=True, spared=[goes_on.folder])
        assert group.folder.lock_record is not None
        goes_on.attach(group.folder.lock_record)
        assert goes_on.is_in_progress
        release.set()
        return goes_on.wait().ok, resumable_step(root / "0") == 1


def test_rank_0_goes_on_with_what_it_writes_alone_since_nobody_shares_its_folder(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, hand_over, tmp_path, tmp_path) == [(True, True)] * 2

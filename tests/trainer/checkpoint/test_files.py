"""Checkpoints of a framework's own files: committed and verified as kdist's, old or new after a
crash at any point, and never taken for those of another format.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kdist_trainer import Checkpointer
from kdist_trainer.checkpoint import export, storage
from kdist_trainer.checkpoint.__main__ import describe
from kdist_trainer.checkpoint.checkpointer import FileCheckpointManager
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.manifest import CheckpointDirectory
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from kdist_trainer.config import Checkpointing
from kdist_trainer.errors import CheckpointMismatchError, StorageError
from tests.trainer.checkpoint.ranks import Rank, prepared_context, run_ranks
from tests.trainer.object_store.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server

pytestmark = pytest.mark.processes

CONTENT = {"weights.bin": b"1234" * 1000, "shards/0/part.bin": b"56"}


def open_files(root: StoragePath, world: Rank) -> FileCheckpointManager:
    return FileCheckpointManager(
        root, world=world, run_id="run-1", config=Checkpointing(mode="blocking"), job={}
    )


def write_share(rank: Rank, step: int) -> Callable[[Path], None]:
    """What a framework does on a rank: rank 0 writes the model, each its own state."""

    def write(folder: Path) -> None:
        if rank.rank == 0:
            for name, data in CONTENT.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
        (folder / f"rank_{rank.rank}").write_text(str(step))

    return write


def save_steps(rank: Rank, root: Path, steps: list[int]) -> list[bool]:
    results: list[SaveResult] = []
    manager = open_files(root, rank)
    manager.on_result = results.append
    manager.find("tests")
    for step in steps:
        manager.save_files(write_share(rank, step), framework="tests", step=step)
    manager.close()
    return [result.ok for result in results]


def find(rank: Rank, root: StoragePath, framework: str = "tests") -> tuple[int, int]:
    """The step that is found, and how many checkpoints were passed over."""
    manager = open_files(root, rank)
    found = manager.find(framework)
    manager.close()
    if found is None:
        return 0, 0
    step, folder = found
    assert {name: (folder / name).read_bytes() for name in CONTENT} == CONTENT
    assert (folder / f"rank_{rank.rank}").read_text() == str(step)
    return step, len(manager.fallbacks)


@pytest.mark.sampled
def test_files_of_two_ranks_are_committed_with_digests_and_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    assert run_ranks(2, save_steps, tmp_path, root, [10, 20]) == [[True, True]] * 2
    entries = describe(root, verify=True)["checkpoints"]
    assert [(one["step"], one["state"], one["files"]) for one in entries] == [
        (20, "verified", 5),
        (10, "verified", 5),
    ]
    assert run_ranks(2, find, tmp_path, root, generation=2) == [(20, 0)] * 2
    newest = root / "step-00000020-e1" / "files" / "shards" / "0" / "part.bin"
    newest.write_bytes(b"57")
    assert run_ranks(2, find, tmp_path, root, generation=3) == [(10, 1)] * 2
    assert [one.step for one in CheckpointDirectory(root).damaged()] == [20]


def fail_on_one(rank: Rank, root: Path) -> tuple[list[str], str]:
    results: list[SaveResult] = []
    manager = open_files(root, rank)
    manager.on_result = results.append

    def write(folder: Path) -> None:
        if rank.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        (folder / "weights.bin").write_bytes(b"12")

    manager.save_files(write, framework="tests", step=1)
    with pytest.raises(StorageError, match="could not be saved") as raised:
        manager.save_files(write, framework="tests", step=2, required=True)
    manager.save_files(write_share(rank, 3), framework="tests", step=3)
    manager.close()
    return [result.cause for result in results], str(raised.value)


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    answers = run_ranks(2, fail_on_one, tmp_path, root)
    assert [causes for causes, _ in answers] == [["enospc"] * 3 + [""]] * 2
    assert all("No space left" in message for _, message in answers)
    directory = CheckpointDirectory(root)
    assert [one.step for one in directory.committed()] == [3]
    assert directory.temporary() == []


def count_operations(root: Path) -> int:
    """How many operations of storage a group's first save has, with an older checkpoint there."""
    save_steps(Rank(0, 1, 1), root, [1])
    seen: list[storage.Operation] = []
    rank = Rank(0, 1, 2)
    manager = open_files(root, rank)
    manager.find("tests")
    with storage.observed(seen.append):
        manager.save_files(write_share(rank, 2), framework="tests", step=2)
    manager.close()
    return len(seen)


def die_in_save(root: Path, at: int) -> None:
    """Save step 2 and end at once before its operation number `at`."""
    rank, count = Rank(0, 1, 2), 0

    def observe(_: storage.Operation) -> None:
        nonlocal count
        count += 1
        if count == at:
            os._exit(9)

    manager = open_files(root, rank)
    manager.find("tests")
    with storage.observed(observe):
        manager.save_files(write_share(rank, 2), framework="tests", step=2)
    os._exit(0)


@pytest.mark.sampled
def test_a_process_that_dies_at_any_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path,
) -> None:
    operations = count_operations(tmp_path / "counted")
    assert operations >= 10
    found = []
    for at in range(1, operations + 1):
        root = tmp_path / f"at-{at}"
        save_steps(Rank(0, 1, 1), root, [1])
        process = prepared_context().Process(target=die_in_save, args=(root, at))
        process.start()
        process.join(120)
        assert process.exitcode == 9, f"operation {at}"
        step, skipped = find(Rank(0, 1, 3), root)
        assert skipped == 0
        assert CheckpointDirectory(root).temporary() == [], "cleaned up by the next group"
        found.append(step)
    assert found == sorted(found), "old until the rename, then new"
    assert set(found) == {1, 2}


def test_a_checkpoint_of_another_format_is_refused_and_neither_loaded_nor_archived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    save_steps(Rank(0, 1, 1), root, [1])
    with pytest.raises(CheckpointMismatchError, match="format of tests"):
        find(Rank(0, 1, 2), root, "others")
    for name, value in (("CHECKPOINTS", str(root)), ("RUN_ID", "run-1"), ("GENERATION", "3")):
        monkeypatch.setenv(f"KDIST_{name}", value)
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointMismatchError, match="this script reads that of kdist"):
        checkpointer.resume()
    checkpointer.close()
    with pytest.raises(CheckpointMismatchError, match="let the framework read"):
        export.prepare(root)
    assert [one.step for one in CheckpointDirectory(root).committed()] == [1]


def in_bucket(rank: Rank, variables: dict[str, str], step: int, scratch: Path) -> tuple[int, int]:
    """Save a step in a bucket, from nodes of one rank each, and find it again."""
    own = scratch / f"node-{rank.rank}"
    own.mkdir(exist_ok=True)
    os.environ.update({**variables, "KDIST_SCRATCH": str(own), "LOCAL_RANK": "0"})
    root = open_location(f"s3://{BUCKET}/run")
    if step:
        results: list[SaveResult] = []
        manager = open_files(root, rank)
        manager.on_result = results.append
        manager.find("tests")
        manager.save_files(write_share(rank, step), framework="tests", step=step)
        manager.close()
        assert results[-1].ok, results[-1].error
        assert not list(own.glob("step-*")), "what is uploaded is no longer here"
        return step, 0
    return find(rank, root)


def test_files_of_two_nodes_are_uploaded_to_a_bucket_and_each_node_downloads_all_of_them(
    tmp_path: Path,
) -> None:
    with S3Server() as server:
        variables = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "KDIST_CHECKPOINTS_ENDPOINT": server.endpoint,
        }
        saved = run_ranks(2, in_bucket, tmp_path, variables, 10, tmp_path)
        assert saved == [(10, 0)] * 2
        names = {key.partition(".files-")[2].partition("/")[2] for key in server.objects}
        assert {"files/weights.bin", "files/shards/0/part.bin", "files/rank_1"} < names
        again = run_ranks(2, in_bucket, tmp_path, variables, 0, tmp_path, generation=2)
        assert again == [(10, 0)] * 2

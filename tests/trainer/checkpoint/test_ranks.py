"""Saving on one number of ranks and loading on another, shared folders and folders of their own."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.commit import SaveResult
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, read_manifest
from kdist_trainer.config import Cause, Checkpointing, Exit
from kdist_trainer.errors import CheckpointMismatchError, PeersLostError, classify
from tests.trainer.checkpoint.ranks import Rank, run_ranks
from tests.trainer.checkpoint.states import (
    FINGERPRINT,
    digest_of,
    load,
    make_state,
    open_store,
    position,
    save,
)

pytestmark = pytest.mark.processes


def save_and_load_again(
    rank: Rank, root: Path, steps: list[int]
) -> tuple[bool, int | None, list[str]]:
    """Load what is there, save each of `steps`; returns whether the folder is shared, the step
    loaded and the names staged.
    """
    store = open_store(root, rank, mode="async")
    loaded = load(store)
    for step in steps:
        assert save(store, step).ok
    staged, _ = store._stager.stage(make_state(0))
    store.close()
    return store.shared, loaded, sorted(staged)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
@pytest.mark.sampled
def test_a_state_saved_on_some_ranks_is_loaded_on_any_other_number_to_the_bit(
    tmp_path: Path, before: int, after: int
) -> None:
    root = tmp_path / "checkpoints"
    first = run_ranks(before, save_and_load_again, tmp_path, root, [1, 2])
    assert [(shared, loaded) for shared, loaded, _ in first] == [(True, None)] * before
    second = run_ranks(after, save_and_load_again, tmp_path, root, [3], generation=2)
    assert [loaded for _, loaded, _ in second] == [2] * after
    manifest = read_manifest(root / "step-00000003-e2")
    assert manifest.world_size == after
    assert manifest.parent == f"step-00000002-e{1}"
    assert sum(name.endswith(".distcp") for name in manifest.files) == after, (
        "every rank writes its share"
    )


def test_replicated_tensors_are_dealt_so_that_each_rank_copies_and_writes_only_its_share(
    tmp_path: Path,
) -> None:
    names = [
        staged
        for _, _, staged in run_ranks(
            3, save_and_load_again, tmp_path, tmp_path / "checkpoints", [1]
        )
    ]
    everything = sorted(name for share in names for name in share)
    assert len(everything) == len(set(everything)), "no tensor is written twice"
    assert {
        "model.fc.weight",
        "optimizer.state.fc.weight.exp_avg",
        "optimizer.state.embedding.exp_avg",
    } <= set(everything)
    large = [{name for name in share if name.endswith(("exp_avg", "fc.weight"))} for share in names]
    assert [len(share) for share in large] == [1, 1, 1], (
        "the three equally large tensors go to three ranks"
    )


def save_apart(rank: Rank, roots: list[Path], step: int) -> tuple[bool, int | None]:
    store = open_store(roots[rank.rank], rank)
    loaded = load(store)
    assert save(store, step).ok
    store.save(make_state(step), position(step), step=step, final={"outcome": "done"})
    store.close()
    return store.shared, loaded


@pytest.mark.sampled
def test_folders_that_are_not_shared_are_written_by_rank_0_and_loaded_from_whoever_has_the_newest(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert run_ranks(2, save_apart, tmp_path, [here, there], 4) == [(False, None)] * 2
    assert [one.step for one in CheckpointDirectory(here).committed()] == [4]
    assert CheckpointDirectory(there).committed() == []
    # The nodes change places: rank 0's own folder is empty, rank 1 has the checkpoint.
    assert run_ranks(2, save_apart, tmp_path, [there, here], 5, generation=2) == [(False, 4)] * 2
    assert [one.step for one in CheckpointDirectory(there).committed()] == [5]
    # Back again, with a generation that this folder has not seen: the newer epoch wins wherever it
    # lies.
    assert run_ranks(2, save_apart, tmp_path, [here, there], 6, generation=2) == [(False, 5)] * 2
    newest = CheckpointDirectory(here).committed()[0]
    assert (newest.step, newest.epoch) == (6, 3)
    for folder in (here, there):
        done = CheckpointDirectory(folder).done()
        assert done is not None, "every node must find that the run has ended"
        assert done["step"] == 6


def continue_apart(rank: Rank, roots: list[Path]) -> tuple[int, int | None]:
    """Continue in place, save step 9, and mark the run as not ended."""
    store = open_store(roots[rank.rank], rank, is_known=True)
    assert save(store, 9).ok
    store.folder.reopen()
    return store.epoch, store.resumed.step if store.resumed is not None else None


@pytest.mark.sampled
def test_ranks_that_continue_in_place_take_an_epoch_above_those_of_all_their_folders(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run_ranks(2, save_apart, tmp_path, [there, tmp_path / "other"], 4, generation=7)
    run_ranks(2, save_apart, tmp_path, [here, tmp_path / "other"], 5)
    assert run_ranks(2, continue_apart, tmp_path, [here, there], generation=2) == [(8, 5)] * 2
    assert CheckpointDirectory(here).committed()[0].name == "step-00000009-e8"
    for folder in (here, there):
        assert CheckpointDirectory(folder).done() is None, "the run has not ended"


@pytest.mark.sampled
def test_a_damaged_checkpoint_in_a_folder_of_its_own_is_passed_over_by_all_ranks(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run_ranks(2, save_apart, tmp_path, [here, there], 1)
    run_ranks(2, save_apart, tmp_path, [here, there], 2, generation=2)
    victim = here / "step-00000002-e2" / "__0_0.distcp"
    victim.write_bytes(victim.read_bytes()[:-1])
    results = run_ranks(2, fall_back_apart, tmp_path, [there, here], generation=3)
    assert results == [(1, [(2, "corrupt")])] * 2


def fall_back_apart(rank: Rank, roots: list[Path]) -> tuple[int | None, list[tuple[int, str]]]:
    store = open_store(roots[rank.rank], rank)
    return load(store), [(one.step, one.cause) for one in store.fallbacks]


def open_sharded(rank: Rank, roots: list[Path]) -> str:
    config = Checkpointing()
    try:
        CheckpointManager(
            roots[rank.rank], world=rank, run_id="r", config=config, job={}, sharded=True
        )
    except CheckpointMismatchError as error:
        return str(error)
    return "opened"


def test_sharded_state_on_folders_that_are_not_shared_is_refused_on_every_rank_with_the_fix(
    tmp_path: Path,
) -> None:
    messages = run_ranks(2, open_sharded, tmp_path, [tmp_path / "a", tmp_path / "b"])
    assert all("ReadWriteMany" in message for message in messages)


def damage_then_load(rank: Rank, root: Path) -> tuple[int | None, list[tuple[int, str]]]:
    store = open_store(root, rank)
    return load(store), [(one.step, one.cause) for one in store.fallbacks]


def test_all_ranks_fall_back_to_the_same_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run_ranks(2, save_and_load_again, tmp_path, root, [1, 2])
    victim = root / "step-00000002-e1" / "__1_0.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert (
        run_ranks(2, damage_then_load, tmp_path, root, generation=2) == [(1, [(2, "corrupt")])] * 2
    )
    assert (root / "step-00000002-e1.damaged" / "__1_0.distcp").read_bytes() == content, (
        "evidence is kept as it was"
    )


def fill_disk_on_one_rank(rank: Rank, root: Path) -> tuple[list[tuple[bool, str]], int | None]:
    """Rank 1 may not write files beyond a few bytes for one save: all ranks must see it fail, and
    the next one succeed.
    """
    import resource
    import signal

    results: list[SaveResult] = []
    store = open_store(root, rank, mode="async")
    load(store)
    store.on_result = results.append
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for step in (1, 2, 3):
        limit = 64 if step == 2 and rank.rank == 1 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        store.save(make_state(step), position(step), step=step)
        store.wait()
    return [(one.ok, one.cause) for one in results], None


def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all_and_the_next_one_succeeds(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    answers = run_ranks(2, fill_disk_on_one_rank, tmp_path, root)
    assert answers == [([(True, ""), (False, "enospc"), (True, "")], None)] * 2
    assert [one.step for one in CheckpointDirectory(root).committed()] == [3, 1]
    assert CheckpointDirectory(root).temporary() == []


def sockets() -> set[int]:
    """Descriptors of this process's sockets."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                found.add(int(path.name))
    return found


def lose_a_peer_in_the_last_save(rank: Rank, root: Path) -> tuple[Cause, Exit, bool] | None:
    """What the failure of rank 0 is taken for, when rank 1 is gone at the last save: its sockets
    for checkpoints are cut.
    """
    others = sockets()
    store = open_store(root, rank, mode="async")
    load(store)
    if rank.rank == 1:
        for descriptor in sockets() - others:
            with socket.socket(fileno=os.dup(descriptor)) as own:
                # gloo ends the process of one that listens
                if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    own.shutdown(socket.SHUT_RDWR)
        return None
    with pytest.raises(PeersLostError, match="the state of step 1 could not be saved") as raised:
        store.save(make_state(1), position(1), step=1, final={"outcome": "done"})
    return classify(raised.value)


def test_a_peer_that_is_lost_in_the_last_save_is_no_failure_of_the_disk(tmp_path: Path) -> None:
    answers = run_ranks(2, lose_a_peer_in_the_last_save, tmp_path, tmp_path / "checkpoints")
    assert answers == [(Cause.NODE_LOST, Exit.PEERS_LOST, False), None]


def train_on_while_saving(rank: Rank, root: Path) -> list[str]:
    """Change the tensors as soon as `save` returns, with collectives of the training in between."""
    store = open_store(root, rank, mode="async", keep=10)
    load(store)
    saved = []
    state = make_state(0, width=64)
    for step in range(1, 6):
        saved.append(digest_of(state))
        store.save(state, position(step), step=step)
        for tensor in state["model"].values():
            tensor.add_(1)
            dist.all_reduce(tensor)
    store.close()
    return saved


def reload_each(rank: Rank, root: Path) -> list[str]:
    """Digests of the checkpoints one after the other, the newest first, each removed when it was
    read.
    """
    found: list[Any] = []
    for generation in range(2, 7):
        tensors = make_state(999, width=64)
        store = open_store(root, Rank(rank.rank, rank.size, generation))
        assert store.load(tensors, fingerprint=FINGERPRINT) is not None
        found.append(digest_of(tensors))
        newest = CheckpointDirectory(root).committed()[0]
        dist.barrier()
        if rank.rank == 0:
            (root / newest.name).rename(root / f"seen-{generation}")
        dist.barrier()
    return found


def test_training_on_while_a_save_is_under_way_does_not_change_what_is_saved(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    saved = run_ranks(2, train_on_while_saving, tmp_path, root)
    assert saved[0] == saved[1]
    assert len(set(saved[0])) == 5
    loaded = run_ranks(2, reload_each, tmp_path, root)
    assert loaded == [saved[0][::-1]] * 2


def measure_stall(rank: Rank, root: Path) -> float:
    """Bytes that this rank copied for a save of 64 MiB."""
    store = open_store(root, rank)
    state = {"model": {f"layer{index}": torch.zeros(1 << 20) for index in range(16)}}
    started = time.monotonic()
    store.save(state, position(1), step=1)
    store.close()
    assert time.monotonic() > started
    return float(sum(tensor.nbytes for tensor in store._stager._buffers.values()))


def test_each_of_n_ranks_copies_one_nth_of_the_bytes(tmp_path: Path) -> None:
    assert run_ranks(2, measure_stall, tmp_path, tmp_path / "checkpoints") == [float(8 << 22)] * 2

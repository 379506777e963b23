"""Rank 0 reads and sends: the same bits as when every rank reads, no more memory than a bucket, and
errors that all learn of.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kdist_trainer.checkpoint import reader
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.config import Checkpointing
from kdist_trainer.distributed.checkpoint_group import (
    CheckpointGroup,
    _Layout,
    broadcast_state,
    buckets,
    send,
)
from tests.trainer.checkpoint.ranks import Rank, run_ranks
from tests.trainer.checkpoint.states import Alone, load, make_state, opened

MEGABYTE = 1 << 20


def store_of(root: Path, rank: Rank) -> CheckpointManager:
    config = Checkpointing(mode="blocking", load="broadcast")
    return CheckpointManager(
        root, world=rank, run_id="run-1", config=config, job={"name": "config-1"}
    )


def load_by_leader(rank: Rank, root: Path) -> tuple[int | None, int, list[str]]:
    """(step, files that this rank opened for reading of tensors, what was skipped)."""
    opened_files = 0
    read: Callable[..., None] = reader.load_tensors

    def counted(*args: Any) -> None:
        nonlocal opened_files
        opened_files += 1
        read(*args)

    reader.load_tensors = counted  # type: ignore[assignment]  # in a process of its own
    store = store_of(root, rank)
    step = load(store)
    store.close()
    return step, opened_files, [one.name for one in store.fallbacks]


@pytest.mark.processes
@pytest.mark.sampled
def test_rank_0_alone_reads_and_all_have_every_bit(root: Path, tmp_path: Path) -> None:
    found = run_ranks(3, load_by_leader, tmp_path, root, generation=2)
    assert [step for step, _, _ in found] == [2, 2, 2]
    assert found[0][1] > 0
    assert [reads for _, reads, _ in found[1:]] == [0, 0]


@pytest.mark.processes
def test_all_ranks_pass_over_what_rank_0_finds_damaged(root: Path, tmp_path: Path) -> None:
    (file,) = (root / "step-00000002-e1").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)
    found = run_ranks(2, load_by_leader, tmp_path, root, generation=2)
    assert [(step, passed) for step, _, passed in found] == [(1, ["step-00000002-e1"])] * 2


def send_and_fail(rank: Rank, fails: bool) -> str:
    def fetch(names: Sequence[str]) -> dict[str, Tensor]:
        if fails and "b" in names:
            raise OSError("no such block")
        return {name: torch.full((3,), 7.0) for name in names}

    held = {"ab"[rank.rank]: torch.zeros(3), "c": torch.zeros(3, dtype=torch.float64)}
    try:
        send(held, fetch, CheckpointGroup(rank), bucket_bytes=1)
    except OSError as error:
        return str(error)
    return str([value.tolist() for value in held.values()])


@pytest.mark.sampled
@pytest.mark.processes
def test_ranks_may_hold_different_names_and_learn_what_the_reading_rank_raised(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, send_and_fail, tmp_path, False) == [str([[7.0] * 3, [7.0] * 3])] * 2
    assert run_ranks(2, send_and_fail, tmp_path, True) == ["no such block"] * 2


def fail_above_0(rank: Rank, first: type[Exception]) -> tuple[str, bool]:
    """What a rank is told by work that fails on all but rank 0, and whether it sees where."""

    def fail_here() -> None:
        if rank.rank > 0:
            raise first("of rank 1") if rank.rank == 1 else OSError("of rank 2")

    try:
        CheckpointGroup(rank).on_all_ranks(fail_here)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__} {error}", ", in fail_here" in traceback.format_exc()
    return "", False


@pytest.mark.processes
@pytest.mark.parametrize("first", [OSError, ValueError])
def test_all_ranks_raise_one_error_with_their_own_place_if_they_failed_alike(
    first: type[Exception], tmp_path: Path
) -> None:
    told, places = zip(*run_ranks(3, fail_above_0, tmp_path, first), strict=True)
    assert {*told} == {f"{first.__name__} of rank 1"}
    assert places == (False, True, first is OSError)


def receive(rank: Rank, *, has_connections: bool) -> dict[str, Any]:
    """What a rank holds afterwards, and whether its large tensor is in the same memory."""
    value = 7.0 if rank.rank == 1 else 0.0
    held: dict[str, Any] = {
        "large": torch.full((MEGABYTE,), value),
        "crossed": torch.full((2, MEGABYTE), value).t(),
        "one": torch.full((), value),
        "two": torch.full((3,), value, dtype=torch.float64),
        "text": str(value),
    }
    if rank.rank == 1:
        held["only here"] = torch.ones(2)
    large = held["large"]
    broadcast_state(held, CheckpointGroup(rank, has_connections=has_connections), source=1)
    assert held["large"] is large
    return {
        name: {float(value.min()), float(value.max())} if isinstance(value, Tensor) else value
        for name, value in held.items()
    }


@pytest.mark.processes
@pytest.mark.parametrize("has_connections", [True, False])
def test_all_ranks_take_over_what_one_has_in_the_memory_that_they_hold(
    has_connections: bool, tmp_path: Path
) -> None:
    work = partial(receive, has_connections=has_connections)
    names = ("large", "crossed", "one", "two")
    expected: dict[str, Any] = {"text": "7.0", **{name: {7.0} for name in names}}
    first, second = run_ranks(2, work, tmp_path)
    assert (first, second) == (expected, {**expected, "only here": {1.0}})


def memory_of_loading(rank: Rank, folder: Path, megabytes: int) -> float:
    """Megabytes, at most, that this rank held next to the state while it loaded it."""
    state = {"model": {f"layer{i}": torch.ones(MEGABYTE // 4) for i in range(megabytes)}}
    store = store_of(folder, rank)
    with Memory() as memory:
        store.load(state, fingerprint="")
    store.close()
    return memory.most_megabytes


class Memory:
    """Watches how far this process's own memory (not that of mapped files) grows inside the
    block.
    """

    def __enter__(self) -> Memory:
        self._over = threading.Event()
        self._before = self._most = self._read()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def most_megabytes(self) -> float:
        return (self._most - self._before) / 1024

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, self._read())

    def _read(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc"
)
def test_no_rank_holds_the_state_twice(tmp_path: Path) -> None:
    size = 384
    store = opened(tmp_path / "run")
    store.save(
        {"model": {f"layer{i}": torch.full((MEGABYTE // 4,), float(i)) for i in range(size)}},
        {"step": 1},
        step=1,
    )
    store.close()
    grown = run_ranks(2, memory_of_loading, tmp_path, tmp_path / "run", size, generation=2)
    assert max(grown) < 0.75 * size, (
        "rank 0 fetches a bucket and flattens it; the others receive one"
    )


@pytest.mark.parametrize("by_leader", [False, True])
def test_files_are_read_to_the_cpu_whatever_device_they_were_saved_from(
    root: Path, monkeypatch: pytest.MonkeyPatch, by_leader: bool
) -> None:
    devices: list[Any] = []
    torch_load: Callable[..., Any] = torch.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        devices.append(kwargs.get("map_location"))
        return torch_load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    config = Checkpointing(mode="blocking", load="broadcast" if by_leader else "each")
    store = CheckpointManager(root, world=Alone(2), run_id="run-1", config=config, job={})
    assert load(store) == 2
    tensors = [device for device in devices if device is not None]
    assert len(tensors) >= 5
    assert set(tensors) == {"cpu"}


@pytest.mark.processes
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a GPU: whether others than the owner's one are touched",
)
def test_only_the_rank_s_own_gpu_is_touched(root: Path) -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    before = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    state = {"model": {name: value.to(last) for name, value in make_state(0)["model"].items()}}
    held = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    fetched = make_state(2)["model"]
    send(
        state["model"],
        lambda names: {name: fetched[name] for name in names},
        CheckpointGroup(Alone()),
    )
    after = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    assert after == held
    assert [index for index, one in enumerate(before) if one != held[index]] == [last.index]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.dictionaries(
        st.text("abcdef", min_size=1, max_size=4),
        st.tuples(st.integers(0, 50), st.booleans()),
        max_size=20,
    ),
    most=st.integers(1, 400),
)
def test_buckets_hold_everything_once_one_type_each_and_no_more_than_asked(
    sizes: dict[str, tuple[int, bool]], most: int
) -> None:
    layouts = {
        name: _Layout(torch.Size([count]), torch.float64 if wide else torch.float32)
        for name, (count, wide) in sizes.items()
    }
    found = list(buckets(layouts, most))
    assert sorted(name for bucket in found for name in bucket) == sorted(layouts)
    assert all(len({layouts[name].dtype for name in bucket}) == 1 for bucket in found)
    assert all(
        len(bucket) == 1 or sum(layouts[name].nbytes for name in bucket) <= most for bucket in found
    )
    assert found == list(buckets(dict(reversed(layouts.items())), most)), (
        "the order in a dict decides nothing"
    )

"""The order of samples, and how a step is dealt to shards and ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdist_trainer.data.sampler import LARGE, FeistelOrder, Order, make_order
from kdist_trainer.data.step_plan import ShardAssignment, StepPlan, split_range
from kdist_trainer.errors import ConfigError, DataError


def indices_by_shard(steps: StepPlan) -> list[tuple[int, int, int, list[int]]]:
    """(step, shard, chunk, indices) of every forward pass that counts, of one rank."""
    found, position, step = [], 0, 0
    while position < steps.total:
        for part in steps.chunks(position):
            if part.weight:
                indices = steps.order.between(position + part.first, position + part.last).tolist()
                found.append((step, part.shard, part.chunk, indices))
        position, step = position + steps.step_size(position), step + 1
    return found


def make_steps(
    *,
    length: int,
    batch: int,
    shards: int,
    rank: int,
    size: int,
    total: int,
    micro: int | None = None,
) -> StepPlan:
    deal = ShardAssignment(batch, shards, rank, size, micro)
    return StepPlan(Order(length=length, seed=5), deal, total=total)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_sample_is_used_once_per_epoch_by_any_number_of_ranks(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 6))
    size = data.draw(st.integers(1, shards))
    batch = data.draw(st.integers(shards, 40))
    length, epochs = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 3))
    micro = data.draw(st.none() | st.integers(1, 10))
    used: Counter[int] = Counter()
    shape = {"length": length, "batch": batch, "shards": shards, "total": epochs * length}
    for rank in range(size):
        steps = make_steps(**shape, rank=rank, size=size, micro=micro)
        used.update(index for *_, indices in indices_by_shard(steps) for index in indices)
    assert used == Counter(dict.fromkeys(range(length), epochs))


@settings(max_examples=80, deadline=None)
@given(
    shards=st.integers(1, 6),
    batch=st.integers(6, 40),
    length=st.integers(1, 60),
    micro=st.none() | st.integers(1, 7),
)
def test_what_a_shard_holds_does_not_depend_on_the_number_of_ranks(
    shards: int, batch: int, length: int, micro: int | None
) -> None:
    shape = {"length": length, "batch": batch, "shards": shards, "total": 2 * length}

    def dealt(size: int) -> list[tuple[int, int, int, list[int]]]:
        groups = [make_steps(**shape, rank=rank, size=size, micro=micro) for rank in range(size)]
        return sorted(part for steps in groups for part in indices_by_shard(steps))

    assert all(dealt(size) == dealt(1) for size in range(2, shards + 1))


def test_an_epoch_ends_inside_a_step_and_only_the_last_step_is_short() -> None:
    steps = make_steps(length=10, batch=4, shards=1, rank=0, size=1, total=30)
    taken = [indices for *_, indices in indices_by_shard(steps)]
    assert [len(indices) for indices in taken] == [4, 4, 4, 4, 4, 4, 4, 2]
    stream = [index for indices in taken for index in indices]
    assert [sorted(stream[start : start + 10]) for start in (0, 10, 20)] == [list(range(10))] * 3
    assert stream[:10] != stream[10:20] != stream[20:]


def test_a_batch_may_be_longer_than_an_epoch() -> None:
    order = Order(length=3, seed=1)
    singly = [order.between(at, at + 1).item() for at in range(1, 11)]
    assert order.between(1, 11).tolist() == singly


def test_a_rank_without_a_sample_in_the_last_step_stands_in_with_weight_zero() -> None:
    ranks = [
        make_steps(length=9, batch=4, shards=4, rank=rank, size=4, total=9) for rank in range(4)
    ]
    weights = [[part.weight for part in steps.chunks(8)] for steps in ranks]
    assert weights == [[1.0], [0.0], [0.0], [0.0]]


def test_uneven_shards_leave_no_rank_empty() -> None:
    expected = [[0, 1], [2], [3]]
    every = [ShardAssignment(12, 4, rank, 3).chunks(12) for rank in range(3)]
    assert [sorted({one.shard for one in chunks}) for chunks in every] == expected


def test_a_shard_is_cut_into_micro_batches() -> None:
    parts = ShardAssignment(10, 2, 0, 1, micro_batch=2).chunks(10)
    expected = [(0, 0, 0, 2), (0, 1, 2, 4), (0, 2, 4, 5), (1, 0, 5, 7), (1, 1, 7, 9), (1, 2, 9, 10)]
    assert [(part.shard, part.chunk, part.first, part.last) for part in parts] == expected


def test_the_order_stays_what_it_was_when_libraries_are_upgraded() -> None:
    order = Order(length=8, seed=2**40 + 1)
    assert [order.epoch(number).tolist() for number in (0, 1)] == GOLDEN


GOLDEN = [[2, 3, 1, 6, 0, 4, 7, 5], [0, 1, 5, 2, 3, 4, 6, 7]]


def test_going_back_to_an_epoch_gives_the_same_order() -> None:
    order = Order(length=20, seed=3)
    first = order.epoch(0).tolist()
    assert order.epoch(7).tolist() != first
    assert order.epoch(0).tolist() == first


def test_a_lone_sample_of_a_short_step_and_a_stand_in_are_scant_but_no_usual_part() -> None:
    deals = [ShardAssignment(12, 4, rank, 2, even=True) for rank in range(2)]
    assert not any(part.too_small for deal in deals for part in deal.chunks(12))
    assert [(part.samples, part.too_small) for part in deals[0].chunks(5)] == [
        (2, False),
        (1, True),
    ]
    assert [(part.samples, part.too_small) for part in deals[1].chunks(2)] == [(0, True)] * 2
    usual = ShardAssignment(12, 4, 0, 2, micro_batch=2).chunks(8)
    assert [part.too_small for part in usual] == [False, False], "a usual part has one sample"
    assert [part.too_small for part in ShardAssignment(4, 4, 0, 1).chunks(3)] == [False] * 3


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), data=st.data())
def test_the_keyed_order_uses_every_sample_once_an_epoch_wherever_it_is_entered(
    length: int, seed: int, data: st.DataObject
) -> None:
    whole = FeistelOrder(length=length, seed=seed).between(0, 2 * length).tolist()
    assert sorted(whole[:length]) == sorted(whole[length:]) == list(range(length))
    first = data.draw(st.integers(0, 2 * length - 1))
    last = data.draw(st.integers(first + 1, 2 * length))
    assert FeistelOrder(length=length, seed=seed).between(first, last).tolist() == whole[first:last]


def test_the_keyed_order_stays_what_it_was() -> None:
    assert FeistelOrder(length=8, seed=2**40 + 1).between(0, 16).tolist() == KEYED
    assert FeistelOrder(length=10**8, seed=7).between(10**9 + 5, 10**9 + 9).tolist() == VAST


KEYED = [5, 3, 1, 2, 7, 0, 6, 4, 3, 5, 7, 4, 0, 6, 1, 2]
VAST = [43414665, 22015241, 66384805, 44359768]


def test_the_keyed_order_is_as_even_as_chance() -> None:
    """Over many keys each sample comes equally often to each place, and next to each other:
    chi-squared, 63 degrees.
    """
    length, draws = 8, 4_000
    places = np.zeros((length, length))
    neighbours = np.zeros((length, length))
    for epoch in range(draws):
        order = FeistelOrder(length=length, seed=1)
        drawn = order._permute(epoch, np.arange(length, dtype=np.uint64)).astype(int)
        places[np.arange(length), drawn] += 1
        neighbours[drawn[:-1], drawn[1:]] += 1
    apart = ~np.eye(length, dtype=bool)
    assert chi_squared(places, draws / length) < 49 + 6 * math.sqrt(2 * 49)
    assert chi_squared(neighbours[apart], draws / length) < 55 + 6 * math.sqrt(2 * 55)


def chi_squared(found: Any, expected: float) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def test_a_large_sets_order_follows_no_line() -> None:
    """Indices are spread evenly over the set, and what comes next tells nothing of what comes
    after.
    """
    length, taken = 10**8, 2**18
    order, start = FeistelOrder(length=length, seed=3), 7 * length + 12_345
    drawn = order.between(start, start + taken).numpy()
    counts = np.bincount(drawn * 256 // length, minlength=256)
    assert chi_squared(counts, taken / 256) < 255 + 6 * math.sqrt(2 * 255)
    for lag in (1, 2, 256, 4096):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 6 / math.sqrt(taken)
    assert len(np.unique(drawn)) == taken
    first, second = (
        FeistelOrder(length=length, seed=3).between(epoch * length, epoch * length + taken).numpy()
        for epoch in (0, 1)
    )
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / math.sqrt(taken)


def test_only_a_large_set_has_the_keyed_order() -> None:
    kinds = [type(make_order(length, seed=0)) for length in (1, LARGE - 1, LARGE)]
    assert kinds == [Order, Order, FeistelOrder]


def test_shares_cover_everything_once() -> None:
    assert [list(split_range(7, 3, holder)) for holder in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("batch", "shards", "size", "field"),
    [(8, 2, 3, "train.virtualShards"), (3, 4, 2, "train.globalBatch")],
)
def test_a_deal_that_leaves_a_rank_or_shard_empty_is_refused(
    batch: int, shards: int, size: int, field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        ShardAssignment(batch, shards, 0, size)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        Order(length=0, seed=0)

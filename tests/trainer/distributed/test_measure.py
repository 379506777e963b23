"""Collectives measured on real ranks: every result checked, wrong ones counted, the slow pair
named.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kdist_trainer.distributed import measure as pairing
from kdist_trainer.distributed.measure import (
    COLLECTIVES,
    BenchRow,
    Collective,
    Effort,
    SlowLink,
    find_slow,
    find_slow_link,
    measure,
    schedule,
    sizes,
    summarize,
)
from kdist_trainer.distributed.world import World
from tests.trainer.training.group import run_group

QUICK = Effort(rounds=4, warmup=1, seconds=60)


def test_a_ladder_of_sizes_starts_at_the_least_and_ends_at_or_below_the_most() -> None:
    assert sizes(1024, 65536, 4) == [1024, 4096, 16384, 65536]
    assert sizes(8, 100, 2) == [8, 16, 32, 64]
    assert sizes(5, 5, 2) == [5]


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
    ],
)
def test_bus_bandwidth_is_nccl_tests(name: str, factor: float) -> None:
    row = summarize(
        torch.tensor([0.5, 1.5], dtype=torch.float64), 1000, COLLECTIVES[name].factor(4), 0
    )
    assert (row.algbw, row.busbw, row.mean, row.p50) == (1000, 1000 * factor, 1, 1)


def measure_all(world_size: int) -> dict[str, BenchRow]:
    assert world_size > 1
    with World.from_environment(timeout_seconds=60) as world:
        return {
            name: measure(one, 6000 if one.sized else 0, world, QUICK, beat=int)
            for name, one in COLLECTIVES.items()
        }


@pytest.mark.sampled
@pytest.mark.processes
def test_every_collective_gives_every_rank_what_it_must_and_all_ranks_report_the_same() -> None:
    first, *others = run_group(measure_all, 3, 3)
    assert all(other == first for other in others)
    assert {name: row.wrong for name, row in first.items()} == dict.fromkeys(COLLECTIVES, 0)
    assert {name: row.rounds for name, row in first.items()} == dict.fromkeys(COLLECTIVES, 4)
    assert {row.size for name, row in first.items() if name != "barrier"} == {6000}
    assert all(0 < row.p50 <= row.p90 <= row.p99 for row in first.values())


def forget_to_send(name: str) -> BenchRow:
    """The collective does nothing: no rank may take what it had for a result."""
    with World.from_environment(timeout_seconds=60) as world:
        right = COLLECTIVES[name]

        def make(world: World, size: int) -> Any:
            return replace(right.make(world, size), run=lambda: None)

        return measure(Collective(make, right.factor), 4096, world, QUICK, beat=int)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_result_that_is_wrong_is_counted_in_every_round(name: str) -> None:
    for row in run_group(forget_to_send, 2, name):
        assert row.wrong > 1000, "each rank, each round, nearly each element"


def name_the_slow(slow: list[int]) -> SlowLink | None:
    """Messages between ranks that are both in `slow` (or that meet its only rank) take 20 ms
    longer.
    """
    with World.from_environment(timeout_seconds=60) as world:

        def exchange(payload: torch.Tensor, other: int, first: bool) -> None:
            if set(slow) <= {world.rank, other}:
                time.sleep(0.02)
            for sends in (first, not first):
                if sends:
                    dist.send(payload, other)
                else:
                    dist.recv(payload, other)

        return find_slow_link(world, 3.0, beat=int, exchange=exchange)[1]


@pytest.mark.processes
@pytest.mark.parametrize("slow", [[1, 2], [2]])
@pytest.mark.sampled
def test_a_slow_pair_is_named_and_a_rank_that_is_slow_with_everybody_as_well(
    slow: list[int],
) -> None:
    found = run_group(name_the_slow, 4, slow)
    assert {one.ranks for one in found} == {tuple(slow)}
    assert found[0].ratio > 3


def test_nobody_is_slow_among_equals_and_two_ranks_have_no_others() -> None:
    assert find_slow({(0, 1): 1.0, (0, 2): 1.4, (1, 2): 1.2}, 2.0) is None
    assert find_slow({(0, 1): 9.0}, 2.0) is None
    assert find_slow({}, 2.0) is None


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 9, 12, 33])
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_at_a_time(ranks: int) -> None:
    turns = list(schedule(ranks))
    met = [pair for turn in turns for pair in turn]
    assert sorted(met) == [(one, other) for one in range(ranks) for other in range(one + 1, ranks)]
    assert all(len({rank for pair in turn for rank in pair}) == 2 * len(turn) for turn in turns)
    if ranks > pairing.MAX_SEQUENTIAL:
        assert len(turns) <= ranks, "pairs without a rank in common meet at the same time"

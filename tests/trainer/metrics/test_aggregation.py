"""Sums over ranks and generations are exact and never decrease."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist_trainer.metrics.aggregation import RankMetrics
from kdist_trainer.metrics.rank_metrics import WALL_CATEGORIES, StepPhase, StepStats, WallCategory
from kdist_trainer.metrics.transport import GAUGES, SLOTS
from tests.trainer.metrics.scrape import full_stats, record_of

STEPS = SLOTS["kdist_steps_total"].start
ATTEMPTS = SLOTS["kdist_checkpoint_attempts_total"].start
LOSS = GAUGES["kdist_loss"]
LAST_STEP = GAUGES["kdist_last_step"]


@pytest.fixture
def totals() -> RankMetrics:
    totals = RankMetrics()
    totals.start_group(generation=1, world_size=2, local_ranks=[0, 1])
    return totals


def test_a_duplicate_record_counts_once(totals: RankMetrics) -> None:
    record = record_of(full_stats(0))
    assert [totals.accept(record, now=1.0), totals.accept(record, now=2.0)] == ["accepted", "stale"]
    assert totals.snapshot().by_rank[0][STEPS] == 1
    assert totals.received == {"accepted": 1, "stale": 1, "malformed": 0}


def test_a_record_that_arrives_out_of_order_changes_nothing(totals: RankMetrics) -> None:
    stats = full_stats(0)
    early = record_of(stats)
    stats.add_step(0.02, 8, 101)
    assert totals.accept(record_of(stats), now=1.0) == "accepted"
    assert totals.accept(early, now=2.0) == "stale"
    assert totals.snapshot().by_rank[0][STEPS] == 2


def test_a_late_record_of_a_dead_generation_changes_nothing(totals: RankMetrics) -> None:
    late = record_of(full_stats(0, generation=1))
    totals.start_group(generation=2, world_size=2, local_ranks=[0, 1])
    assert totals.accept(late, now=1.0) == "stale"
    assert totals.snapshot().by_rank[0][STEPS] == 0


def test_a_record_of_a_rank_that_is_not_local_is_malformed(totals: RankMetrics) -> None:
    assert totals.accept(record_of(full_stats(7)), now=1.0) == "malformed"
    assert 7 not in totals.snapshot().by_rank


def test_records_that_arrive_before_their_group_starts_count_once_it_does(
    totals: RankMetrics,
) -> None:
    assert totals.accept(record_of(full_stats(1, generation=2)), now=1.0) == "accepted"
    assert totals.snapshot().by_rank[1][STEPS] == 0
    totals.start_group(generation=2, world_size=2, local_ranks=[0, 1])
    assert totals.snapshot().by_rank[1][STEPS] == 1
    assert totals.snapshot().received_at == {1: 1.0}


def test_a_rank_that_restarts_within_a_generation_adds_to_its_counters(totals: RankMetrics) -> None:
    first, second = full_stats(0), full_stats(0)
    second.started_ns = first.started_ns + 1
    late = record_of(first)
    for record in (record_of(first), record_of(second)):
        assert totals.accept(record, now=1.0) == "accepted"
    assert totals.accept(late, now=1.0) == "stale"
    assert totals.snapshot().by_rank[0][STEPS] == 2
    assert totals.snapshot().rank_zero[ATTEMPTS] == 4


def test_a_counter_that_decreases_within_a_rank_is_held(totals: RankMetrics) -> None:
    stats = full_stats(0)
    totals.accept(record_of(stats), now=1.0)
    stats.phase[2] -= 0.5
    totals.accept(record_of(stats), now=2.0)
    backward = SLOTS["kdist_step_phase_seconds_total"].start + 2
    assert totals.snapshot().by_rank[0][backward] == pytest.approx(0.003)


def test_only_current_ranks_are_shown_and_they_continue_the_counters_of_their_predecessors(
    totals: RankMetrics,
) -> None:
    for rank, steps in ((0, 3), (1, 5)):
        stats = StepStats(rank=rank, generation=1)
        for step in range(steps):
            stats.add_step(0.02, 8, step)
        totals.accept(record_of(stats), now=1.0)
    totals.start_group(generation=2, world_size=3, local_ranks=[1, 2])
    assert {rank: sums[STEPS] for rank, sums in totals.snapshot().by_rank.items()} == {1: 5, 2: 3}


def test_when_a_node_gets_fewer_ranks_no_step_is_lost(totals: RankMetrics) -> None:
    for rank in (0, 1):
        totals.accept(record_of(full_stats(rank)), now=1.0)
    totals.start_group(generation=2, world_size=1, local_ranks=[0])
    assert totals.snapshot().by_rank[0][STEPS] == 2


def test_when_rank_0_moves_away_its_counters_stay_and_its_gauges_go(
    totals: RankMetrics,
) -> None:
    totals.accept(record_of(full_stats(0)), now=1.0)
    assert totals.snapshot().gauges[LOSS] == 0.5
    totals.start_group(generation=2, world_size=4, local_ranks=[2, 3])
    totals.accept(record_of(full_stats(2, generation=2)), now=1.0)
    assert totals.snapshot().rank_zero[ATTEMPTS] == 2
    assert totals.snapshot().gauges[LOSS] is None
    assert totals.snapshot().gauges[LAST_STEP] == 100


def test_gauges_show_their_last_values_until_the_new_group_reports(totals: RankMetrics) -> None:
    totals.accept(record_of(full_stats(0)), now=1.0)
    totals.start_group(generation=2, world_size=2, local_ranks=[0, 1])
    assert (totals.snapshot().gauges[LOSS], totals.snapshot().gauges[LAST_STEP]) == (0.5, 100)
    stats = StepStats(rank=0, generation=2)
    stats.add_step(0.02, 8, 60)
    totals.accept(record_of(stats), now=2.0)
    assert totals.snapshot().gauges[LAST_STEP] == 60


def test_a_step_is_productive_except_for_its_wait_for_data(totals: RankMetrics) -> None:
    for generation in (1, 2):
        stats = StepStats(rank=0, generation=generation)
        stats.add_step(2.0, 8, 1)
        stats.phase[StepPhase.DATA_WAIT] += 0.5
        stats.add_wall(WallCategory.INIT, 3.0)
        totals.start_group(generation=generation, world_size=2, local_ranks=[0, 1])
        totals.accept(record_of(stats), now=1.0)
    spent = dict(zip(WALL_CATEGORIES, totals.wall_seconds(), strict=True))
    assert (spent["data_wait"], spent["productive_step"], spent["init"]) == (1.0, 3.0, 6.0)


groups = st.tuples(
    st.integers(0, 5),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=6),
)


@given(st.lists(groups, min_size=1, max_size=8))
@pytest.mark.sampled
def test_no_series_goes_back_and_no_step_is_lost_however_ranks_are_renumbered(
    history: list[tuple[int, int, list[tuple[int, int]]]],
) -> None:
    totals, done, shown = RankMetrics(), 0, dict[int, float]()
    for generation, (first, count, reports) in enumerate(history, start=1):
        totals.start_group(
            generation=generation, world_size=8, local_ranks=range(first, first + count)
        )
        ranks = {
            rank: StepStats(rank=rank, generation=generation)
            for rank in range(first, first + count)
        }
        for local_rank, steps in reports:
            stats = ranks[first + local_rank % count]
            for _ in range(steps):
                stats.add_step(0.02, 8, 1)
            done += steps
            totals.accept(record_of(stats), now=1.0)
        now = {rank: sums[STEPS] for rank, sums in totals.snapshot().by_rank.items()}
        assert sum(now.values()) == done == totals.total(STEPS)
        assert all(now[rank] >= shown.get(rank, 0) for rank in now)
        shown = now

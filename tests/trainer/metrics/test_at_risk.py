"""What a loss of all ranks would cost, as the agent that runs rank 0 counts it."""

from __future__ import annotations

from kdist_trainer.metrics.aggregation import WorkAtRisk
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import Record, pack, unpack

BEGAN = 1000.0


def report(
    *,
    committed: float | None = None,
    seconds: float = 0.0,
    interval: float | None = 60.0,
    rank: int = 0,
) -> Record:
    """What a rank reports after its first step, of a second, and perhaps a save."""
    stats = StepStats(rank=rank)
    stats.last_step_time, stats.step_ewma = BEGAN + 1, 1.0
    stats.checkpoint_interval = interval
    stats.checkpoint_time = committed
    stats.checkpoint_duration[-1] = seconds
    return unpack(pack(stats))


def start(kept: float = 0.0) -> WorkAtRisk:
    work = WorkAtRisk()
    work.start_group(kept, has_rank_zero=True)
    work.add(report(), now=BEGAN + 1)
    return work


def test_all_training_is_at_risk_until_something_is_committed() -> None:
    work = start()
    assert work.seconds(now=BEGAN + 40) == 40
    work.add(report(committed=BEGAN + 50, seconds=10.0), now=BEGAN + 50)
    assert work.seconds(now=BEGAN + 70) == 30, "the save holds the state of when it began"
    series = work.series(now=BEGAN + 70)
    assert series["kdist_checkpoint_at_risk_seconds"] == {(): [30]}
    assert series["kdist_checkpoint_last_duration_seconds"] == {(): [10]}


def test_between_groups_it_does_not_grow_and_in_place_it_goes_on() -> None:
    work = start()
    work.stop(now=BEGAN + 40, is_kept=True)
    assert work.seconds(now=BEGAN + 90) == 40
    work.start_group(40, has_rank_zero=True)
    assert work.seconds(now=BEGAN + 95) == 40
    work.add(report(), now=BEGAN + 100)
    work.add(report(committed=BEGAN + 120, seconds=5.0), now=BEGAN + 120)
    assert work.seconds(now=BEGAN + 130) == 15, "the save holds what was kept too"
    work.stop(now=BEGAN + 130, is_kept=False)
    assert work.seconds(now=BEGAN + 190) is None, "no rank of this node holds it any more"
    assert not any(work.series(now=BEGAN + 190).values())
    work.start_group(0, has_rank_zero=True)
    assert work.seconds(now=BEGAN + 200) == 0, "the ranks went back to a checkpoint"


def test_it_is_unknown_without_saves_on_another_node_and_after_the_end() -> None:
    nothing = WorkAtRisk()
    nothing.start_group(0, has_rank_zero=True)
    nothing.add(report(interval=None), now=BEGAN + 1)
    assert nothing.seconds(now=BEGAN + 9) is None
    assert not any(nothing.series(now=BEGAN + 9).values())
    other = WorkAtRisk()
    other.start_group(0, has_rank_zero=False)
    other.add(report(rank=1), now=BEGAN + 1)
    assert other.seconds(now=BEGAN + 9) is None
    moved = start()
    moved.start_group(30, has_rank_zero=False)
    assert moved.seconds(now=BEGAN + 9) is None
    ended = start()
    ended.end()
    assert ended.seconds(now=BEGAN + 9) is None

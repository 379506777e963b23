"""How far apart saves are, as the training tells it, and what it goes on with in place."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from kdist_trainer.checkpoint.interval import SaveClock, SaveInterval
from kdist_trainer.config import Every
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.training import regroup, trainer
from kdist_trainer.training.checkpointing import TrainerCheckpointing


@pytest.mark.parametrize(
    ("every", "step_seconds", "interval"),
    [
        (Every(seconds=300), None, 300),
        (Every(steps=100), None, None),
        (Every(steps=100), 0.5, 50),
        (Every(seconds=300, steps=100), 0.5, 50),
        (Every(seconds=30, steps=100), 0.5, 30),
    ],
)
def test_the_interval_of_saves_is_the_configured_one_or_that_of_the_steps(
    every: Every, step_seconds: float | None, interval: float | None
) -> None:
    stats = StepStats()
    stats.step_ewma = step_seconds
    nothing: Any = None
    assert (
        TrainerCheckpointing(
            None, nothing, every=every, step_log=nothing, stats=stats
        ).interval_seconds()
        == interval
    )


def test_in_place_a_training_goes_on_with_the_clock_of_the_rank_that_all_continue_with() -> None:
    theirs = SaveClock(SaveInterval(60), lost=50)
    theirs.cuts = 2
    nothing: Any = None
    training = TrainerCheckpointing(
        None, nothing, every=Every(seconds=60), step_log=nothing, stats=StepStats()
    )
    training.clock.load(theirs.to_json())
    training.clock.follow(training.committed_step)
    assert (training.clock.unsaved, training.clock.must_block) == (50, True)


def at_step_30(*, best: int, committed: int, carried: int | None = None) -> MagicMock:
    """The context of a rank whose training is at step 30 and saves every 100 steps."""
    ctx, nothing = MagicMock(), MagicMock()
    ctx.checkpointing = TrainerCheckpointing(
        None, nothing, every=Every(steps=100), step_log=nothing, stats=StepStats()
    )
    ctx.checkpointing.best_at, ctx.checkpointing.committed_step = best, committed
    ctx.checkpointing.carrying.step = carried
    ctx.state.step, ctx.target, ctx.step_records, ctx.losses = 30, 100, [], []
    ctx.sync_exchange.drain.return_value = []
    return ctx


@pytest.mark.parametrize(("committed", "is_due"), [(20, True), (30, False)])
def test_in_place_the_state_of_the_best_evaluation_is_saved_if_it_was_not_yet(
    monkeypatch: pytest.MonkeyPatch, committed: int, is_due: bool
) -> None:
    monkeypatch.setattr(regroup, "replace", lambda training, **_: training)
    kept = regroup.keep(at_step_30(best=30, committed=committed))
    assert kept is not None
    assert kept.is_due is is_due


@pytest.mark.parametrize(
    ("best", "carried", "saves"), [(30, None, 1), (30, 30, 0), (30, 28, 1), (-1, None, 0)]
)
def test_an_evaluation_that_is_only_now_done_in_place_is_saved_if_it_is_the_best(
    monkeypatch: pytest.MonkeyPatch, best: int, carried: int | None, saves: int
) -> None:
    ctx, saved = at_step_30(best=-1, committed=20, carried=carried), list[int]()

    def evaluate(_: object) -> None:
        ctx.checkpointing.best_at = best

    monkeypatch.setattr(regroup, "take_over", lambda *_: (MagicMock(), None))
    monkeypatch.setattr(trainer, "log_resume", lambda *_: None)
    monkeypatch.setattr(trainer, "seek_data", lambda _: None)
    monkeypatch.setattr(trainer, "run_missed_evaluation", evaluate)
    monkeypatch.setattr(trainer, "save", lambda ctx: saved.append(ctx.state.step))
    trainer.setup(ctx)
    assert saved == [30] * saves

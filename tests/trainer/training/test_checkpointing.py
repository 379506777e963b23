"""How far apart saves are, as the training tells it, and what it goes on with in place."""

from __future__ import annotations

from typing import Any

import pytest

from kdist_trainer.checkpoint.interval import SaveClock, SaveInterval
from kdist_trainer.config import Every
from kdist_trainer.metrics.rank_metrics import StepStats
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

"""The pace and the loss curve of a training follow from its recent steps."""

from __future__ import annotations

import math

from kdist.status.step_history import StepHistory


def test_the_time_left_follows_from_the_pace_of_recent_steps() -> None:
    history = StepHistory()
    assert history.seconds_left(0.0, 100, max_age=10) is None
    history.record(0.0, 10, 1.0)
    assert history.seconds_left(0.0, 100, max_age=10) is None
    history.record(5.0, 20, 0.5)
    assert history.seconds_left(5.0, 100, max_age=10) == 40.0
    assert history.seconds_left(5.0, None, max_age=10) is None
    assert history.seconds_left(16.0, 100, max_age=10) is None


def test_a_rollback_discards_the_pace_and_keeps_the_losses() -> None:
    history = StepHistory()
    history.record(0.0, 10, 1.0)
    history.record(1.0, 20, 0.5)
    history.record(2.0, 5, 0.9)
    assert history.seconds_left(2.0, 100, max_age=10) is None
    assert list(history.losses) == [1.0, 0.5, 0.9]


def test_repeated_steps_and_unknown_or_infinite_losses_add_no_point_to_the_curve() -> None:
    history = StepHistory()
    history.record(0.0, None, 1.0)
    history.record(1.0, 10, 1.0)
    history.record(2.0, 10, 0.5)
    history.record(3.0, 20, math.nan)
    history.record(4.0, 30, None)
    assert list(history.losses) == [1.0]

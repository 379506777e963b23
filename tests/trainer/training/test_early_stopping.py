"""Training ends early when its evaluations get no better."""

from __future__ import annotations

import math

import pytest

from kdist_trainer.config import Best, EarlyStop
from kdist_trainer.errors import ConfigError
from kdist_trainer.training.evaluation import EarlyStopping


def observed(patience: EarlyStopping, *values: float) -> list[bool]:
    return [patience.observe({"loss": value}) for value in values]


def test_patience_counts_from_the_best_evaluation_on() -> None:
    assert observed(EarlyStopping(EarlyStop(patience=2)), 3.0, 2.0, 2.5, 1.0, 1.1, 1.2) == [
        False
    ] * 5 + [True]


def test_less_than_the_smallest_progress_is_none() -> None:
    assert observed(EarlyStopping(EarlyStop(patience=1, min_delta=0.5)), 3.0, 2.6) == [False, True]


def test_more_is_better_where_the_goal_says_so() -> None:
    patience = EarlyStopping(EarlyStop(metric="accuracy", goal="max", patience=1))
    expected = [False, False, True]
    assert [patience.observe({"accuracy": value}) for value in (0.5, 0.6, 0.6)] == expected


def test_a_number_that_is_not_finite_is_no_progress() -> None:
    assert observed(EarlyStopping(EarlyStop(patience=2)), math.nan, 1.0, -math.inf, math.nan) == [
        False,
        False,
        False,
        True,
    ]


def test_a_metric_that_is_not_measured_is_reported_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"has no `accuracy`; it has bits, loss"):
        EarlyStopping(EarlyStop(metric="accuracy")).observe({"loss": 1.0, "bits": 2.0})


def test_patience_survives_a_checkpoint() -> None:
    first, second = EarlyStopping(EarlyStop(patience=3)), EarlyStopping(EarlyStop(patience=3))
    observed(first, 1.0, 2.0, 2.0)
    second.load_state_dict(first.state_dict())
    assert observed(second, 2.0) == [True]


def test_the_best_evaluation_is_known_after_a_resume_and_by_its_own_metric() -> None:
    def judge(stopping: EarlyStopping, *values: float) -> list[bool]:
        return [stopping.record_best({"accuracy": value, "loss": -value}) for value in values]

    best = Best(metric="accuracy", goal="max")
    first, second, other = (EarlyStopping(None, each) for each in (best, best, Best()))
    assert judge(first, math.nan, 0.5, 0.5, 0.6, 0.4) == [False, True, False, True, False]
    second.load_state_dict(first.state_dict())
    other.load_state_dict(first.state_dict())
    assert judge(second, 0.6, 0.7) == [False, True]
    assert judge(other, 0.1) == [True]

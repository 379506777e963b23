"""A guard leaves out updates whose gradient is not finite or much larger than usual."""

from __future__ import annotations

import math

import pytest

from kdist_trainer.config import Training
from kdist_trainer.training.gradient_guard import MOST_ROLLBACKS, USUAL_AFTER, GradientGuard


def make(**section: object) -> GradientGuard:
    return GradientGuard(
        Training.model_validate(
            {"workload": "digits", "steps": 1, "on_nonfinite": "skip", **section}
        )
    )


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_left_out(norm: float) -> None:
    assert "norm is" in make().judge(1, norm)


def test_without_a_factor_any_finite_gradient_counts() -> None:
    guard = make()
    assert [guard.judge(step, 10.0**step) for step in range(1, 30)] == [""] * 29


def test_a_spike_is_told_from_what_is_usual_once_that_is_known() -> None:
    guard = make(grad_spike_factor=4.0)
    assert guard.judge(1, 100.0) == "", "nothing is usual yet"
    guard = make(grad_spike_factor=4.0)
    for step in range(1, USUAL_AFTER + 1):
        assert guard.judge(step, 1.0) == ""
    assert "more than 4 times the usual 1" in guard.judge(USUAL_AFTER + 1, 4.1)
    assert guard.judge(USUAL_AFTER + 2, 3.9) == "", "a spike is not learnt from"


def test_what_is_usual_survives_a_checkpoint() -> None:
    guard, other = make(grad_spike_factor=4.0), make(grad_spike_factor=4.0)
    for step in range(1, USUAL_AFTER + 1):
        guard.judge(step, 1.0)
    other.load_state_dict(guard.state_dict())
    assert other.judge(99, 5.0) == guard.judge(99, 5.0) != ""


def test_a_step_that_was_gone_back_for_is_left_out_when_it_comes_again() -> None:
    guard = make(on_nonfinite="rollback")
    assert guard.rolls_back
    assert guard.ban(7, since=5)
    assert guard.is_banned(7)
    assert "went back" in guard.judge(7, 1.0)
    assert guard.judge(8, 1.0) == ""


def test_going_back_to_one_checkpoint_has_an_end() -> None:
    guard = make(on_nonfinite="rollback")
    assert all(guard.ban(step, since=5) for step in range(6, 6 + MOST_ROLLBACKS))
    assert not guard.ban(99, since=5)
    assert guard.ban(100, since=90), "progress begins a new count"

"""A guard leaves out updates whose gradient is not finite or much larger than usual."""

from __future__ import annotations

import math

import pytest

from kdist_trainer.config import Training
from kdist_trainer.training.gradient_guard import MAX_ROLLBACKS, WARMUP_STEPS, GradientGuard


def make(**section: object) -> GradientGuard:
    return GradientGuard(
        Training.model_validate(
            {"workload": "digits", "steps": 1, "on_nonfinite": "skip", **section}
        )
    )


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_left_out(norm: float) -> None:
    assert "norm is" in make().skip_reason(1, norm)


def test_without_a_factor_any_finite_gradient_counts() -> None:
    guard = make()
    assert [guard.skip_reason(step, 10.0**step) for step in range(1, 30)] == [""] * 29


def test_a_spike_is_reported_from_what_is_usual_once_that_is_known() -> None:
    guard = make(grad_spike_factor=4.0)
    assert guard.skip_reason(1, 100.0) == "", "nothing is usual yet"
    guard = make(grad_spike_factor=4.0)
    for step in range(1, WARMUP_STEPS + 1):
        assert guard.skip_reason(step, 1.0) == ""
    assert "more than 4 times the usual 1" in guard.skip_reason(WARMUP_STEPS + 1, 4.1)
    assert guard.skip_reason(WARMUP_STEPS + 2, 3.9) == "", "a spike is not learnt from"


def test_what_is_usual_survives_a_checkpoint() -> None:
    guard, other = make(grad_spike_factor=4.0), make(grad_spike_factor=4.0)
    for step in range(1, WARMUP_STEPS + 1):
        guard.skip_reason(step, 1.0)
    other.load_state_dict(guard.state_dict())
    assert other.skip_reason(99, 5.0) == guard.skip_reason(99, 5.0) != ""


def test_a_step_that_was_gone_back_for_is_left_out_when_it_comes_again() -> None:
    guard = make(on_nonfinite="rollback")
    assert guard.rolls_back(7)
    assert guard.skip_step(7, checkpoint_step=5)
    assert not guard.rolls_back(7)
    assert "rolled back" in guard.skip_reason(7, 1.0)
    assert guard.skip_reason(8, 1.0) == ""


def test_going_back_to_one_checkpoint_has_an_end() -> None:
    guard = make(on_nonfinite="rollback")
    assert all(guard.skip_step(step, checkpoint_step=5) for step in range(6, 6 + MAX_ROLLBACKS))
    assert not guard.skip_step(99, checkpoint_step=5)
    assert guard.skip_step(100, checkpoint_step=90), "progress begins a new count"

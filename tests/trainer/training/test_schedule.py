"""The curve of the learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kdist_trainer.config import Schedule
from kdist_trainer.workload import build_scheduler, lr_factor


def curve(steps: int, **settings: Any) -> list[float]:
    share = lr_factor(Schedule(**settings), steps=steps)
    return [round(share(step), 6) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "constant"}, [1, 1, 1, 1, 1]),
        ({"name": "constant", "warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        ({"name": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"name": "linear", "final_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"name": "linear", "warmup_steps": 2}, [0.333333, 0.666667, 1, 0.5, 0]),
        (
            {"name": "cosine"},
            [
                1,
                round((1 + math.cos(math.pi / 4)) / 2, 6),
                0.5,
                round((1 - math.cos(math.pi / 4)) / 2, 6),
                0,
            ],
        ),
        ({"name": "cosine", "warmup_steps": 9}, [0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_the_curve_rises_and_falls_as_asked(
    settings: dict[str, Any], expected: list[float]
) -> None:
    assert curve(5, **settings) == expected


def test_the_warm_up_is_linear_as_its_field_says() -> None:
    share = lr_factor(Schedule(name="cosine", warmup_steps=4), steps=9)
    assert [share(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert "steps of linear warm-up to the peak" in str(
        Schedule.model_fields["warmup_steps"].description
    )


def test_a_run_of_one_step_uses_the_peak() -> None:
    assert curve(1, name="cosine") == [1]


def test_a_rate_that_never_moves_needs_no_scheduler() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert build_scheduler(optimizer, Schedule(), steps=10) is None

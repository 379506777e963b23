"""The names that frameworks log under."""

from __future__ import annotations

import math

import torch

from kdist_trainer.integrations import values


def test_the_first_known_name_that_has_a_number_is_chosen() -> None:
    logged = {"train_loss": torch.tensor(0.5), "loss": "n/a", "lr": 1, "flags": torch.zeros(2)}
    assert values.choose(logged, values.LOSS) == 0.5
    assert values.choose(logged, values.LEARNING_RATE) == 1.0
    assert values.choose(logged, values.GRAD_NORM) is None
    assert values.choose({"loss": torch.zeros(2)}, values.LOSS) is None
    assert math.isnan(values.choose({"loss": math.nan}, values.LOSS) or 0.0)


def test_what_an_evaluation_has_logged_is_told_from_the_training_by_its_name() -> None:
    logged = {"eval_loss": 1.5, "val/accuracy": torch.tensor(0.25), "train_loss": 2, "value": 3}
    assert values.of_evaluation(logged) == {"loss": 1.5, "accuracy": 0.25}

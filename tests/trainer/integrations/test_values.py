"""The names that frameworks log under."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from kdist_trainer.integrations import framework


def test_the_first_known_name_that_has_a_number_is_chosen() -> None:
    logged = {"train_loss": torch.tensor(0.5), "loss": "n/a", "lr": 1, "flags": torch.zeros(2)}
    assert framework.choose_value(logged, framework.LOSS) == 0.5
    assert framework.choose_value(logged, framework.LEARNING_RATE) == 1.0
    assert framework.choose_value(logged, framework.GRAD_NORM) is None
    assert framework.choose_value({"loss": torch.zeros(2)}, framework.LOSS) is None
    assert math.isnan(framework.choose_value({"loss": math.nan}, framework.LOSS) or 0.0)


def test_the_name_that_frameworks_have_for_the_loss_of_a_step_stands_in_one_place() -> None:
    assert framework.LOSS[0] == framework.STEP_LOSS
    named = {
        path.name
        for path in Path(framework.__file__).parent.glob("*.py")
        if re.search(rf'"{framework.STEP_LOSS}"(?!:)', path.read_text())
    }
    assert named == {"framework.py"}


def test_what_an_evaluation_has_logged_is_told_from_the_training_by_its_name() -> None:
    logged = {"eval_loss": 1.5, "val/accuracy": torch.tensor(0.25), "train_loss": 2, "value": 3}
    assert framework.evaluation_metrics(logged) == {"loss": 1.5, "accuracy": 0.25}

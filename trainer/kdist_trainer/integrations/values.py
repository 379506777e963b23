"""The names under which frameworks and their users log what kdist shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LOSS = ("loss", "train_loss", "train/loss", "training_loss")
LEARNING_RATE = ("learning_rate", "lr", "train/learning_rate", "train/lr")
GRAD_NORM = ("grad_norm", "train/grad_norm")
_EVALUATION = ("eval_", "eval/", "validation_", "validation/", "val_", "val/", "test_", "test/")
TARGETS = ("max_train_steps", "max_steps", "total_steps", "num_training_steps")
"""Names of the number of steps in the configuration of a run."""


def choose(values: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """The number that is logged under the first of these names; None if there is none."""
    for name in names:
        number = _number(values.get(name))
        if number is not None:
            return number
    return None


def of_evaluation(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that an evaluation has logged, without the `eval_` or `val/` in front."""
    found = {}
    for name, value in values.items():
        prefix = next((one for one in _EVALUATION if name.startswith(one)), None)
        number = _number(value)
        if prefix is not None and number is not None:
            found[name.removeprefix(prefix)] = number
    return found


def _number(value: Any) -> float | None:
    """A number, or a tensor of one, as a float; None for anything else."""
    if isinstance(value, bool | str) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several
        return None

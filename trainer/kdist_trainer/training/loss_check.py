"""Checks, when a run begins, what `Workload.loss` returns: a mean instead of a sum would train
wrongly without any error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from kdist_trainer.errors import ConfigError
from kdist_trainer.workload import Workload

_SAMPLES = 4
_TOLERANCE = 1e-4
_WAY = (
    "return the loss summed over the batch and how many terms it sums, "
    'such as `cross_entropy(…, reduction="sum"), len(labels)`'
)


def split(workload: Workload, returned: Any) -> tuple[Tensor, int]:
    """Loss and count from the return value of `loss`. Raises `ConfigError` if it is
    something else.
    """
    if isinstance(returned, Sequence) and len(returned) == 2 and isinstance(returned[0], Tensor):
        loss, count = returned
        if isinstance(count, Tensor) and count.numel() == 1:
            count = int(count)
        if isinstance(count, int):
            return loss, count
    what = f"a {type(returned).__name__}"
    if isinstance(returned, Sequence):
        what = f"({', '.join(type(one).__name__ for one in returned)})"
    raise ConfigError(
        f"{type(workload).__name__}.loss must return (Tensor, int), and returned {what}: {_WAY}"
    )


def check_loss(workload: Workload, loss: Tensor, count: int, samples: int) -> None:
    """Check the loss and its count. Raises `ConfigError` if the loop would weight
    the loss wrongly.
    """
    name, units = type(workload).__name__, workload.units_per_sample
    if loss.ndim != 0:
        raise ConfigError(
            f"{name}.loss must return the sum over the batch, a scalar; its shape is "
            f"{tuple(loss.shape)}: {_WAY}"
        )
    if units is not None and samples and count != units * samples:
        raise ConfigError(
            f"{name}.loss counted {count} terms in {samples} samples, where "
            f"units_per_sample says {units * samples}: "
            "set units_per_sample, or to None where the count depends on the data"
        )


@torch.no_grad()
def refuse_mean(
    workload: Workload,
    module: nn.Module,
    batch: Any,
    samples: int,
    *,
    everywhere: Callable[[bool], bool] = lambda own: own,
) -> None:
    """Compare the loss of a few samples with that of the same samples twice: a sum doubles, a mean
    does not. Raises `ConfigError` for a mean.

    Nothing is checked where this cannot be decided: batches that cannot be doubled, a loss of 0, a
    model that is random in eval mode, code that only works in train mode.

    `everywhere`: whether a condition holds on all ranks. If the model is spread over several ranks
    its forward pass is collective, so all ranks skip the check if the batch of one cannot be
    doubled.
    """
    few = min(samples, _SAMPLES)
    pair: tuple[Any, Any] | None = None
    with suppress(_Indivisible):
        pair = _taken(batch, samples, list(range(few))), _taken(batch, samples, [*range(few)] * 2)
    if not everywhere(samples > 0 and pair is not None) or pair is None:
        return
    with _evaluating(module):
        try:
            single, double = (split(workload, workload.loss(module, one)) for one in pair)
        except Exception:  # noqa: BLE001 - a loss that cannot be computed so is not judged: training is what it is for
            return
    (one, count), (two, doubled) = (float(single[0]), single[1]), (float(double[0]), double[1])
    if not math.isfinite(one) or one == 0 or count == 0 or doubled != 2 * count:
        return
    if abs(two - one) <= _TOLERANCE * abs(one):
        raise ConfigError(
            f"{type(workload).__name__}.loss returns a mean, it seems: {one:.6g} for "
            f"{count} terms, and {two:.6g} for the same "
            f"ones twice. The loop divides by the terms of the whole step itself; {_WAY}"
        )


class _Indivisible(Exception):  # noqa: N818 - a state of a batch
    """Not every part of the batch has one entry for each sample."""


def _taken(batch: Any, samples: int, indices: list[int]) -> Any:
    """These samples of a batch whose tensors have one row per sample. Raises `_Indivisible` for
    other batches.
    """
    if isinstance(batch, Tensor):
        if batch.ndim == 0 or len(batch) != samples:
            raise _Indivisible
        return batch[torch.tensor(indices, device=batch.device)]
    if isinstance(batch, dict):
        return {key: _taken(value, samples, indices) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        taken = [_taken(value, samples, indices) for value in batch]
        return type(batch)(*taken) if hasattr(batch, "_fields") else type(batch)(taken)
    raise _Indivisible


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Run in eval mode without gradients; afterwards every submodule is in its former mode."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training

"""Checks, when a run starts, what `Workload.loss` returns: a mean instead of a sum would train
wrongly without any error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from kdist_trainer.errors import ConfigError
from kdist_trainer.state import eval_mode
from kdist_trainer.workload import Workload

_SAMPLES = 4
_TOLERANCE = 1e-4
_FIX = (
    "return the loss summed over the batch and how many terms it sums, "
    'such as `cross_entropy(…, reduction="sum"), len(labels)`'
)


def split(workload: Workload, returned: Any) -> tuple[Tensor, int]:
    """Split the return value of `loss` into the loss (a scalar tensor) and the count.

    Raises:
        ConfigError: If it is something else.
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
        f"{type(workload).__name__}.loss must return (Tensor, int), and returned {what}: {_FIX}"
    )


def check_loss(workload: Workload, loss: Tensor, count: int, samples: int) -> None:
    """Check that the loop will scale the loss correctly.

    Args:
        workload: The workload that returned them.
        loss: Must be a scalar.
        count: Terms of the loss.
        samples: Samples in the batch; 0 for a stand-in, whose count is not checked.

    Raises:
        ConfigError: If the loss is not a scalar, or `count` contradicts `units_per_sample`.
    """
    name, units = type(workload).__name__, workload.units_per_sample
    if loss.ndim != 0:
        raise ConfigError(
            f"{name}.loss must return the sum over the batch, a scalar; its shape is "
            f"{tuple(loss.shape)}: {_FIX}"
        )
    if units is not None and samples and count != units * samples:
        raise ConfigError(
            f"{name}.loss counted {count} terms in {samples} samples, where "
            f"units_per_sample says {units * samples}: "
            "set units_per_sample, or to None where the count depends on the data"
        )


@torch.no_grad()
def reject_mean(
    workload: Workload,
    module: nn.Module,
    batch: Any,
    samples: int,
    *,
    on_all_ranks: Callable[[bool], bool] = lambda own: own,
) -> None:
    """Compare the loss of a few samples with that of the same samples twice: a sum doubles, a mean
    does not.

    Nothing is checked where this cannot be decided: batches whose samples cannot be selected, a
    loss of 0, a model that is random in eval mode, code that only works in train mode.

    Args:
        workload: The workload to check.
        module: Its model.
        batch: A batch of `samples` samples.
        samples: Number of samples in it.
        on_all_ranks: Returns whether a condition holds on all ranks. If the model is sharded, its
            forward pass is collective, so all ranks skip the check if one must.

    Raises:
        ConfigError: If the loss is a mean.
    """
    few = min(samples, _SAMPLES)
    pair: tuple[Any, Any] | None = None
    with suppress(_NotIndexableError):
        pair = _select(batch, samples, list(range(few))), _select(batch, samples, [*range(few)] * 2)
    if not on_all_ranks(samples > 0 and pair is not None) or pair is None:
        return
    with eval_mode(module):
        try:
            single, double = (split(workload, workload.loss(module, one)) for one in pair)
        except Exception:  # noqa: BLE001 - a loss that only works in training is not checked
            return
    once, count = float(single[0]), single[1]
    twice, double_count = float(double[0]), double[1]
    if not math.isfinite(once) or once == 0 or count == 0 or double_count != 2 * count:
        return
    if abs(twice - once) <= _TOLERANCE * abs(once):
        raise ConfigError(
            f"{type(workload).__name__}.loss seems to return a mean: {once:.6g} for {count} terms, "
            f"and {twice:.6g} for the same terms twice. The loop itself divides by the number of "
            f"terms in the whole step; {_FIX}"
        )


class _NotIndexableError(Exception):
    """Not every part of the batch has one entry for each sample."""


def _select(batch: Any, samples: int, indices: list[int]) -> Any:
    """Select samples of a batch whose tensors have one row per sample. Raises
    `_NotIndexableError` for other batches.
    """
    if isinstance(batch, Tensor):
        if batch.ndim == 0 or len(batch) != samples:
            raise _NotIndexableError
        return batch[torch.tensor(indices, device=batch.device)]
    if isinstance(batch, dict):
        return {key: _select(value, samples, indices) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        selected = [_select(value, samples, indices) for value in batch]
        return type(batch)(*selected) if hasattr(batch, "_fields") else type(batch)(selected)
    raise _NotIndexableError

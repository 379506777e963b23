"""A moving average of the weights: what is evaluated and exported where `emaDecay` is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from kdist_trainer.state import parameter_names
from kdist_trainer.world import to_local


class Ema:
    """An exponential moving average of the weights that this rank holds.

    After every step, average = decay * average + (1 - decay) * weight. Averages are fp32 where
    weights have fewer bits: 1/1000 of a difference is too small to be added in bf16.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        # Collected once: a sharded model replaces its parameters while it computes.
        self._weights: dict[str, Tensor] = {
            name: weight for weight, name in parameter_names(module).items()
        }
        self._step_weight = 1 - decay
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.tensors = {name: _widen(weight) for name, weight in self._weights.items()}
        pairs = [(weight, self.tensors[name]) for name, weight in self._weights.items()]
        self._widened = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        self._same_dtype = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the current weights."""
        if self._same_dtype:
            weights, averages = zip(
                *[(to_local(weight), to_local(average)) for weight, average in self._same_dtype],
                strict=True,
            )
            self._average(averages, weights, None)
        # one by one, so that at most one weight has an fp32 copy at a time
        for weight, average in self._widened:
            own = to_local(average)
            own.lerp_(to_local(weight).to(own.dtype), self._step_weight)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the averages to the current weights."""
        for name, weight in self._weights.items():
            to_local(self.tensors[name]).copy_(to_local(weight))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the `with` block, the model's weights are the averages."""
        saved = [to_local(weight).clone() for weight, _ in self._widened]
        with torch.no_grad():
            for weight, average in self._widened:
                to_local(weight).copy_(to_local(average))
        self._swap()
        try:
            yield
        finally:
            self._swap()
            with torch.no_grad():
                for (weight, _), own in zip(self._widened, saved, strict=True):
                    to_local(weight).copy_(own)

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in self._same_dtype:
            own, other = to_local(weight), to_local(average)
            saved = own.clone()
            own.copy_(other)
            other.copy_(saved)


class NullEma:
    """No moving average: the weights themselves are evaluated."""

    tensors: dict[str, Tensor] = {}  # noqa: RUF012 - never written

    def update(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def swapped_in(self) -> AbstractContextManager[None]:
        """A `with` block that changes nothing."""
        return nullcontext()


def _widen(weight: Tensor) -> Tensor:
    """A copy with at least 32 bits per element."""
    narrow = weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize
    return weight.detach().to(torch.float32) if narrow else weight.detach().clone()

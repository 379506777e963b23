"""A moving average of the weights: what is evaluated and exported where `emaDecay` is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kdist_trainer.world import to_local


class Ema:
    """average = decay * average + (1 - decay) * weight, after every step; each rank averages the
    weights that it holds.

    Averages are fp32 where weights have fewer bits: 1/1000 of a difference is too small to be added
    in bf16.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        # Taken once: a sharded model has other tensors in their place while it computes.
        self._weights = dict(module.named_parameters())
        self._share = 1 - decay
        self.tensors = {name: _widened(weight) for name, weight in self._weights.items()}
        names = [
            name for name in self.tensors if self.tensors[name].dtype != self._weights[name].dtype
        ]
        self._narrow = [(self._weights[name], self.tensors[name]) for name in names]
        self._equal = [
            (self._weights[name], self.tensors[name])
            for name in self.tensors
            if name not in {*names}
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the current weights."""
        if self._equal:
            weights, averages = zip(
                *[(to_local(one), to_local(other)) for one, other in self._equal], strict=True
            )
            torch._foreach_lerp_(averages, weights, self._share)
        # one by one, so that at most one weight is there in fp32 besides
        for weight, average in self._narrow:
            own = to_local(average)
            own.lerp_(to_local(weight).to(own.dtype), self._share)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Set the averages to the current weights."""
        for name, weight in self._weights.items():
            to_local(self.tensors[name]).copy_(to_local(weight))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the `with` block, the model's weights are the averages."""
        kept = [to_local(weight).clone() for weight, _ in self._narrow]
        with torch.no_grad():
            for weight, average in self._narrow:
                to_local(weight).copy_(to_local(average))
        self._swap()
        try:
            yield
        finally:
            self._swap()
            with torch.no_grad():
                for (weight, _), own in zip(self._narrow, kept, strict=True):
                    to_local(weight).copy_(own)

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in self._equal:
            own, other = to_local(weight), to_local(average)
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)


def _widened(weight: Tensor) -> Tensor:
    """A copy with at least fp32."""
    narrow = weight.is_floating_point() and weight.dtype.itemsize < torch.float32.itemsize
    return weight.detach().to(torch.float32) if narrow else weight.detach().clone()

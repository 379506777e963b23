"""A moving average of the weights: what is evaluated and exported where `emaDecay` is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kdist_trainer.shards import local


class Averages:
    """average = decay * average + (1 - decay) * weight, after every step; each rank averages what it holds."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        # Taken once: a sharded model has other tensors in their place while it computes.
        self._weights, self._share = dict(module.named_parameters()), 1 - decay
        self.tensors = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights as they are now."""
        weights = [local(weight) for weight in self._weights.values()]
        torch._foreach_lerp_([local(one) for one in self.tensors.values()], weights, self._share)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Be the weights as they are now."""
        for name, weight in self._weights.items():
            local(self.tensors[name]).copy_(local(weight))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the model's weights are the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            own, average = local(weight), local(self.tensors[name])
            kept = own.clone()
            own.copy_(average)
            average.copy_(kept)

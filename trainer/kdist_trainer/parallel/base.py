"""What a strategy of parallel training must offer the loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class Strategy(Protocol):
    """Spreads one model over the ranks. After `wrap`, the loop only calls the wrapped model."""

    sharded: bool
    """Whether each rank holds (and saves) a part of the state; False: all ranks hold the same."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the loop calls it: a backward pass leaves the gradients' mean over the ranks. Collective."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which backward passes only add up gradients on this rank."""
        ...

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that a checkpoint holds: {"model": …, "optimizer": …}, tensors by full name. Collective if sharded."""
        ...

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Take over what a checkpoint brought into the values of `tensors`. Collective if sharded."""
        ...

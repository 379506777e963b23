"""What a strategy of parallel training must offer the loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


class Strategy(Protocol):
    """Spreads one model over the ranks. After `wrap`, the loop only calls the wrapped model."""

    sharded: bool
    """Whether each rank holds (and saves) a part of the state; False: all ranks hold the same.

    A sharded model's forward pass is collective, so all ranks must make equally many.
    """

    counts: bool
    """Whether this rank's losses and samples are counted: of the ranks that share a copy of the
    model, one has its say.
    """

    copies: dist.ProcessGroup | None
    """After `wrap`: the ranks that hold the same buffers, the first copy's rank first; None for a
    process alone.
    """

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """The model as the loop calls it: a backward pass leaves the gradients' mean over the
        ranks. Collective.

        `blocks` are the parts of it that are gathered, computed and let go one after the other.
        """
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """A block in which backward passes only add up gradients on this rank."""
        ...

    def let_go(self) -> None:
        """Free what a forward pass without a backward pass has gathered."""
        ...

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that a checkpoint holds: {"model": …, "optimizer": …}, tensors by full name.
        Collective if sharded.
        """
        ...

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Take over what a checkpoint brought into the values of `tensors`. Collective if
        sharded.
        """
        ...

    def weights(self) -> dict[str, Any]:
        """The whole model's state by full names, every tensor whole and on the CPU.

        Collective if sharded, and then empty on all ranks but rank 0.
        """
        ...

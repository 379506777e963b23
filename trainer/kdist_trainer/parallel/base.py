"""The interface between a strategy of parallel training and the training loop, and what is the same
for all strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kdist_trainer import state
from kdist_trainer.state import AS_NEW, BufferNames, ValueKind


class Strategy:
    """Distributes one model over the ranks. After `wrap`, the loop only calls the wrapped model."""

    sharded = False
    """Whether each rank holds (and saves) a part of the state; False: all ranks hold the same.

    A sharded model's forward pass is collective, so all ranks must run equally many.
    """

    is_counted = True
    """Whether this rank's losses and samples are counted: one rank of each model replica is."""

    module: nn.Module
    """The model as the workload built it, without a wrapper."""

    replica_group: dist.ProcessGroup | None
    """After `wrap`: the ranks that hold the same buffers, the first replica's rank first; None for
    a single process.
    """

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Distribute the model, as the workload built it, with the same weights on every rank.
        `blocks` are parts of it that are gathered, computed and resharded one after the other.
        Returns the model as the loop calls it: a backward pass leaves the gradients' mean over the
        replicas. Collective. Raises `ConfigError` if the strategy cannot distribute this model on
        these ranks.
        """
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the `with` block, backward passes only add up gradients on this rank."""
        return nullcontext()

    def reshard(self) -> None:
        """Free the weights that a forward pass without a backward pass has gathered."""

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state for a checkpoint: {"model": ..., "optimizer": ...}, tensors by full name, with
        the optimizer's states that exist. Collective if sharded.
        """
        return state.read_state(self.module, optimizer)

    def template(
        self, saved: Mapping[str, ValueKind], optimizer: Optimizer, *, buffers: BufferNames = AS_NEW
    ) -> dict[str, Any]:
        """A state as `state_dict` returns it, of the shape that was saved: a checkpoint fills it,
        and `load_state_dict` loads it. Collective if sharded. `saved` is what the whole checkpoint
        holds, by flat name.
        """
        return state.template(self.module, optimizer, saved, buffers=buffers)

    def load_state_dict(
        self, values: dict[str, Any], optimizer: Optimizer, *, buffers: BufferNames = AS_NEW
    ) -> None:
        """Load all of a state that `state_dict` or `template` returned. Collective if sharded.
        Raises `StateMismatchError`, with nothing loaded, if it is of another model or optimizer.
        """
        state.load_state(self.module, optimizer, values, buffers=buffers)

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's state by full names, every tensor whole and on the CPU.

        Collective if sharded, and then empty on all ranks but rank 0.
        """
        return {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in state.read_module(self.module).items()
        }

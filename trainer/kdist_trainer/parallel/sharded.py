"""The state of a model whose weights are spread over the ranks: how it is taken for a checkpoint, and put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer


class Sharded:
    """What strategies have in common that spread weights, most of them by torch's `fully_shard`."""

    sharded = True
    counts = True
    module: nn.Module
    copies: dist.ProcessGroup | None

    def shard(
        self, model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, *, offload: OffloadPolicy | None = None
    ) -> nn.Module:
        """Shard each block, then the rest of the model, in place; `offload` says where the shards are kept."""
        policy = offload or OffloadPolicy()
        for block in blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        self.module = model
        return model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block keep whole gradients on the rank, and reduce nothing."""
        module = self.module if isinstance(self.module, FSDPModule) else None
        if module is not None:
            module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if module is not None:
                module.set_requires_gradient_sync(True)

    def let_go(self) -> None:
        """Keep this rank's parts only."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """Model and optimizer by full names, each tensor as this rank's part of it."""
        return {
            "model": get_model_state_dict(self.module),
            "optimizer": get_optimizer_state_dict(self.module, optimizer),
        }

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Load the values back into module and optimizer."""
        set_state_dict(self.module, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])

    def weights(self) -> dict[str, Any]:
        """The whole model on rank 0, nothing on the others: only one of them should need memory for it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.module, options=options)

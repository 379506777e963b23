"""`fsdp` and `hsdp`: torch's FSDP2 (`fully_shard`), with each weight sharded over the ranks.

A block's weights are gathered just before it computes and freed afterwards, so weights, gradients
and optimizer state take 1/N of the memory that `ddp` needs. `hsdp` shards within a node and
replicates across nodes: gathering stays on the fast links, and only gradients cross the slow ones.
`Sharded` saves and restores the sharded state.
"""

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from kdist_trainer.errors import ConfigError
from kdist_trainer.world import World


class Sharded:
    """What strategies have in common that spread weights, most of them by torch's `fully_shard`."""

    sharded = True
    counts = True
    module: nn.Module
    copies: dist.ProcessGroup | None

    def shard(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        offload: OffloadPolicy | None = None,
    ) -> nn.Module:
        """Shard each block, then the rest of the model, in place; `offload` says where the shards
        are kept.
        """
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
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )

    def weights(self) -> dict[str, Any]:
        """The whole model on rank 0, nothing on the others: only one of them should need memory for
        it.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.module, options=options)


class Fsdp(Sharded):
    """`fully_shard` over all ranks, or with `hybrid` over those of each node."""

    def __init__(self, world: World, *, hybrid: bool, offload: bool = False) -> None:
        """`offload`: keep shards in the memory of the CPU. Raises `ConfigError` where `hybrid` has
        nodes of different sizes.
        """
        self._world = world
        self._hybrid = hybrid
        # Pages that are not swapped are what a GPU copies from fast; without one they are only
        # taken from everybody else.
        self._offload = (
            CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else None
        )
        if hybrid and world.size % world.local_size:
            raise ConfigError(
                f"train.strategy: hsdp needs nodes of equal size; {world.size} ranks are "
                f"not {world.local_size} each"
            )

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Shard each block, then the rest of the model, in place."""
        self.copies = dist.group.WORLD  # buffers are not sharded
        return self.shard(model, blocks, self._mesh(), offload=self._offload)

    def _mesh(self) -> DeviceMesh:
        kind, world = self._world.device.type, self._world
        if not self._hybrid:
            return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
        shape = (world.size // world.local_size, world.local_size)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

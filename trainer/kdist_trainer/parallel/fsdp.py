"""`fsdp` and `hsdp`: torch's FSDP2 (`fully_shard`), with each weight sharded over the ranks.

A block's weights are gathered just before it computes and freed afterwards, so weights, gradients
and optimizer state take 1/N of the memory that `ddp` needs. `hsdp` shards within a node and
replicates across nodes: gathering stays on the fast links, and only gradients cross the slow ones.
`Sharded` saves and restores the sharded state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from kdist_trainer import state
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.state import AS_NEW, BufferNames, ValueKind


class Sharded(Strategy):
    """Base of the strategies that distribute weights as DTensors."""

    sharded = True

    def shard(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        offload: OffloadPolicy | None = None,
    ) -> nn.Module:
        """Shard each block, then the rest of the model, in place, over the mesh, which has one
        dimension or (replicate, shard). By default the shards are kept on the device.
        """
        policy = offload or OffloadPolicy()
        for block in blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        self.module = model
        return model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the `with` block, backward passes keep whole gradients on this rank."""
        module = self.module if isinstance(self.module, FSDPModule) else None
        if module is not None:
            module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if module is not None:
                module.set_requires_gradient_sync(True)

    def reshard(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def template(
        self, saved: Mapping[str, ValueKind], optimizer: Optimizer, *, buffers: BufferNames = AS_NEW
    ) -> dict[str, Any]:
        """A state of the saved shape, each tensor as this rank's shard of it.

        How an optimizer shards what has another shape than its parameter, only the optimizer knows:
        it takes a step that changes no weight then.
        """
        found = state.template(self.module, optimizer, saved, buffers=buffers)
        if not optimizer.state and any(
            isinstance(value, Tensor) and value.ndim and not isinstance(value, DTensor)
            for _, value in state.flatten(found["optimizer"]["state"]).values()
        ):
            get_optimizer_state_dict(self.module, optimizer)
            return state.template(self.module, optimizer, saved, buffers=buffers)
        return found

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0, nothing on the others: only one of them should need memory for
        it.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.module, options=options)


class Fsdp(Sharded):
    """`fully_shard` over all ranks, or with `hybrid` over those of each node."""

    def __init__(self, world: World, *, hybrid: bool, offload: bool = False) -> None:
        """Choose where shards are kept: with `offload` in CPU memory. Raises `ConfigError` if
        `hybrid` is set and nodes have different numbers of ranks.
        """
        self._world = world
        self._hybrid = hybrid
        # A GPU copies faster from pinned memory; without a GPU, pinning only takes memory from
        # other processes.
        self._offload = (
            CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else None
        )
        if hybrid and world.size % world.local_size:
            raise ConfigError(
                f"train.strategy: hsdp needs nodes of equal size; {world.size} ranks are "
                f"not {world.local_size} each"
            )

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        self.replica_group = dist.group.WORLD  # buffers are not sharded
        kind, world = self._world.device.type, self._world
        if self._hybrid:
            shape = (world.size // world.local_size, world.local_size)
            mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
        return self.shard(model, blocks, mesh, offload=self._offload)

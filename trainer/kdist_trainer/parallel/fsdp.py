"""fsdp and hsdp: every rank holds a part of each weight; a block is gathered whole just before it is computed, then let go.

torch's FSDP2 (`fully_shard`). Weights, gradients and optimizer state take 1/N of the memory that `ddp` needs. `hsdp` shards
within a node and replicates across nodes: gathering stays on the fast links, and only gradients cross the slow ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from kdist_trainer.failure import ConfigProblem
from kdist_trainer.parallel.sharded import Sharded
from kdist_trainer.world import World


class Fsdp(Sharded):
    """`fully_shard` over all ranks, or with `hybrid` over those of each node."""

    def __init__(self, world: World, *, hybrid: bool, offload: bool = False) -> None:
        """`offload`: keep shards in the memory of the CPU. Raises `ConfigProblem` where `hybrid` has nodes of different sizes."""
        self._world, self._hybrid = world, hybrid
        # Pages that are not swapped are what a GPU copies from fast; without one they are only taken from everybody else.
        self._offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else None
        if hybrid and world.size % world.local_size:
            raise ConfigProblem(
                f"train.strategy: hsdp needs nodes of equal size; {world.size} ranks are not {world.local_size} each"
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

"""ddp: every rank holds the whole model; gradients are averaged in buckets while the backward pass still runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kdist_trainer.world import World


class Ddp:
    """torch's DistributedDataParallel, with a communication hook where one is asked for."""

    sharded = False

    def __init__(self, world: World, *, bucket_mib: int = 25, hook: Any = None, hook_state: Any = None) -> None:
        self._world, self._bucket_mib, self._hook, self._hook_state = world, bucket_mib, hook, hook_state
        self._module: nn.Module
        self._wrapped: DistributedDataParallel

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model; rank 0's weights and buffers are sent to all."""
        self._module = model
        devices = [self._world.device] if self._world.device.type == "cuda" else None
        self._wrapped = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=self._bucket_mib)
        if self._hook is not None:
            self._wrapped.register_comm_hook(self._hook_state, self._hook)
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block stay on the rank."""
        return self._wrapped.no_sync()

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """Model and optimizer by full names; the optimizer's state is made (as zeros) where it had none yet."""
        model, optim = get_state_dict(self._module, optimizer)
        return {"model": model, "optimizer": optim}

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Load the values back into module and optimizer."""
        set_state_dict(
            self._module, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"]
        )


def process_group() -> dist.ProcessGroup:
    """The group that gradients are averaged in."""
    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - the world is open while a model is wrapped
    return group

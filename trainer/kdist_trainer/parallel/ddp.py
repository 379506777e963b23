"""Data parallelism: every rank or GPU holds the whole model.

`ddp` averages gradients in buckets while the backward pass still runs. `data_parallel` is torch's
DataParallel: one process copies the model to all GPUs in each step and gathers the outputs on the
first. It is slower than `ddp` with one process per GPU, even on one machine. `Replicated` saves and
restores the state of a model that every rank holds whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kdist_trainer import log
from kdist_trainer.errors import ConfigError
from kdist_trainer.world import World


class Replicated:
    """What `ddp` and `data_parallel` have in common. The module is the one that the workload made,
    not its wrapper.
    """

    sharded = False
    counts = True
    module: nn.Module
    copies: dist.ProcessGroup | None

    def let_go(self) -> None:
        """Nothing was gathered."""

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """Model and optimizer by full names; an optimizer that never stepped is made to take a step
        that moves nothing.
        """
        if not optimizer.state:
            get_optimizer_state_dict(self.module, optimizer)
        return {"model": self.module.state_dict(), "optimizer": named_state(self.module, optimizer)}

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Load the values back into module and optimizer."""
        set_state_dict(
            self.module,
            optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )

    def weights(self) -> dict[str, Any]:
        """The module's own state, on the CPU."""
        state = self.module.state_dict()
        return {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }


def named_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state with parameters by name: what torch's `get_optimizer_state_dict` gives,
    a hundred times faster.

    The training stands still for it at every save, and here every rank has every tensor whole.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[one] for one in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {
        "state": {names[one]: dict(state) for one, state in optimizer.state.items()},
        "param_groups": groups,
    }


class Ddp(Replicated):
    """torch's DistributedDataParallel."""

    def __init__(self, world: World, *, bucket_mib: int) -> None:
        self._world = world
        self._bucket_mib = bucket_mib
        self._wrapped: DistributedDataParallel

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:  # noqa: ARG002 - DDP buckets by size
        """Wrap the model; rank 0's weights are sent to all."""
        self.module, self.copies = model, dist.group.WORLD
        devices = [self._world.device] if self._world.device.type == "cuda" else None
        # The loop sends buffers after a step; DDP would before the next one, and not at all after
        # the last.
        with warnings.catch_warnings():
            # the word that torch 2.13 has for it is unknown to 2.10
            warnings.simplefilter("ignore", FutureWarning)
            self._wrapped = DistributedDataParallel(
                model, device_ids=devices, bucket_cap_mb=self._bucket_mib, broadcast_buffers=False
            )
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block stay on the rank."""
        return self._wrapped.no_sync()


class DataParallel(Replicated):
    """torch's DataParallel over all GPUs of the one process."""

    # the first GPU's replica works on the module's own buffers
    copies: dist.ProcessGroup | None = None

    def __init__(self, world: World) -> None:
        """Raises `ConfigError` in a group of several ranks, whose gradients nobody would
        average.
        """
        if world.size > 1:
            raise ConfigError(
                "train.strategy: data_parallel is one process with several GPUs, and "
                f"this job has {world.size} ranks: "
                "set nodes: 1 and procsPerNode: 1, or use ddp"
            )
        self._devices = torch.cuda.device_count()

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:  # noqa: ARG002 - every GPU gets a whole copy
        """The model on all GPUs, or as it is where there are fewer than two; says which."""
        self.module = model
        several = self._devices > 1
        log.warn(
            "data-parallel",
            devices=self._devices,
            message=(
                f"the model is copied to {self._devices} GPUs in every step; ddp with one "
                "rank per GPU is faster"
            )
            if several
            else (
                "data_parallel does nothing on fewer than two GPUs: the model trains as in "
                "one process"
            ),
        )
        return nn.DataParallel(model) if several else model

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nobody to wait for."""
        return nullcontext()

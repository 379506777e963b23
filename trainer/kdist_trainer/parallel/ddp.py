"""ddp: every rank holds the whole model; gradients are averaged in buckets while the backward pass still runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kdist_trainer.timing import Launcher
from kdist_trainer.world import World


class Ddp:
    """torch's DistributedDataParallel, its all-reduces timed where a timer is given."""

    sharded = False

    def __init__(self, world: World, *, bucket_mib: int, timer: Launcher | None) -> None:
        self._world, self._bucket_mib, self._timer = world, bucket_mib, timer
        self._module: nn.Module
        self._wrapped: DistributedDataParallel

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model; rank 0's weights and buffers are sent to all."""
        self._module = model
        devices = [self._world.device] if self._world.device.type == "cuda" else None
        self._wrapped = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=self._bucket_mib)
        if self._timer is not None:
            launch = self._timer.launch
            # DDP compares the hook's annotations with types, which they are not under postponed evaluation: hence a lambda.
            self._wrapped.register_comm_hook(None, lambda _, bucket: launch(bucket))
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block stay on the rank."""
        return self._wrapped.no_sync()

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """Model and optimizer by full names; an optimizer that never stepped is made to take a step that moves nothing."""
        if not optimizer.state:
            get_optimizer_state_dict(self._module, optimizer)
        return {"model": self._module.state_dict(), "optimizer": named_state(self._module, optimizer)}

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Load the values back into module and optimizer."""
        set_state_dict(self._module, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])


def named_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state with parameters by name: what torch's `get_optimizer_state_dict` gives, a hundred times faster.

    The training stands still for it at every save, and here every rank has every tensor whole.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [names[one] for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": {names[one]: dict(state) for one, state in optimizer.state.items()}, "param_groups": groups}

"""The state of a model that every rank holds whole: how it is taken for a checkpoint, and put back."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_state_dict
from torch.optim import Optimizer


class Replicated:
    """What `ddp` and `data_parallel` have in common. The module is the one that the workload made, not its wrapper."""

    sharded = False
    counts = True
    module: nn.Module
    copies: dist.ProcessGroup | None

    def let_go(self) -> None:
        """Nothing was gathered."""

    def tensors(self, optimizer: Optimizer) -> dict[str, Any]:
        """Model and optimizer by full names; an optimizer that never stepped is made to take a step that moves nothing."""
        if not optimizer.state:
            get_optimizer_state_dict(self.module, optimizer)
        return {"model": self.module.state_dict(), "optimizer": named_state(self.module, optimizer)}

    def put(self, tensors: dict[str, Any], optimizer: Optimizer) -> None:
        """Load the values back into module and optimizer."""
        set_state_dict(self.module, optimizer, model_state_dict=tensors["model"], optim_state_dict=tensors["optimizer"])

    def weights(self) -> dict[str, Any]:
        """The module's own state, on the CPU."""
        state = self.module.state_dict()
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


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

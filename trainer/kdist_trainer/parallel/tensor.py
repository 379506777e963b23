"""tensor: neighbouring ranks compute every large matrix product together, each with its part of the
weights.

torch's DTensor and `parallelize_module`, by a plan that the workload gives. The ranks of one copy
of the model read the same samples and exchange activations in every layer, so they belong on one
node; over the copies the model is sharded as by `fsdp`. What the plan leaves out is computed by
every rank of a copy alike.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_map_only

from kdist_trainer.errors import ConfigError
from kdist_trainer.parallel.fsdp import Sharded
from kdist_trainer.workload import Workload
from kdist_trainer.world import World


class Tensor(Sharded):
    """The workload's plan over the ranks of each copy, `fully_shard` over the copies."""

    def __init__(self, world: World, workload: Workload) -> None:
        self._world = world
        self._workload = workload
        # Weights are gathered whole for `weights` only: that this takes two operations is not worth
        # a warning on every rank.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.counts = world.model_rank == 0

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Split what the plan names, spread the rest whole, shard over the copies; in place.

        Raises `ConfigError` for a workload that has no plan, or one that this model cannot follow.
        """
        name = type(self._workload).__name__
        plan = self._workload.tensor_plan(model, self._world.model_parallel)
        if plan is None:
            raise ConfigError(
                "train.strategy: tensor needs a plan of the model, and "
                f"{name}.tensor_plan gives none: use fsdp, or write one"
            )
        # What a plan's last part gives is a view, which torch warns of: it must not be changed in
        # place.
        warnings.filterwarnings(
            "ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor"
        )
        mesh = self._world.mesh()
        self.copies = mesh["data"].get_group()
        split(model, mesh["model"], plan, who=name)
        for path, module in model.named_modules():
            replicate(module, mesh["model"], path=f"{name}.model: {path or type(module).__name__}")
        if self._world.data_size > 1:
            return self.shard(model, blocks, mesh["data"])
        self.module = model  # the only copy: what would be gathered is there already
        return model


def split(model: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle], *, who: str) -> None:
    """Split the parts that the plan names. Raises `ConfigError` for names that no part has, of
    which torch only warns.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Parallelize plan key")
        try:
            parallelize_module(model, mesh, plan)
        except UserWarning as warning:
            key = str(warning).partition("'")[2].partition("'")[0]
            raise ConfigError(
                f"{who}.tensor_plan names {key}, and the model has no such part"
            ) from None


def replicate(module: nn.Module, mesh: DeviceMesh, *, path: str) -> None:
    """Let every rank have the module's own weights, if the plan left it out; it is given and gives
    plain tensors.

    Raises `ConfigError` where it has weights and parts besides, so that plain and spread tensors
    would meet in it.
    """
    own = [
        (name, weight)
        for name, weight in module.named_parameters(recurse=False)
        if not isinstance(weight, DTensor)
    ]
    if not own:
        return
    if any(True for _ in module.children()):
        raise ConfigError(
            f"{path} has weights of its own ({own[0][0]}) and parts besides: give them a "
            "module, or plan it"
        )
    for name, weight in own:
        spread_weight = distribute_tensor(weight.detach(), mesh, [Replicate()])
        module.register_parameter(
            name, nn.Parameter(spread_weight, requires_grad=weight.requires_grad)
        )

    def take(_: nn.Module, inputs: Any, named: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda one: _spread(one, mesh), (inputs, named))

    def give(_: nn.Module, __: Any, outputs: Any) -> Any:
        return tree_map_only(DTensor, lambda one: one.to_local(), outputs)

    module.register_forward_pre_hook(take, with_kwargs=True)
    module.register_forward_hook(give)


def _spread(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return (
        value
        if isinstance(value, DTensor)
        else DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    )

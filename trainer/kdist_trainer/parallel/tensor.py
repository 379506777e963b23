"""`tensor`: tensor parallelism, in which neighboring ranks compute every large matrix product
together, each with its part of the weights.

It is torch's DTensor and `parallelize_module`, by a plan that the workload provides. The ranks of
one model replica read the same samples and exchange activations in every layer, so they belong on
one node; over the replicas the model is sharded as with `fsdp`. Every rank of a replica computes
what the plan does not name.
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

from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError
from kdist_trainer.parallel.fsdp import Sharded
from kdist_trainer.torch_internals import tree_map_only
from kdist_trainer.workload import Workload

UNMATCHED = "names {}, and the model has no such part"
MIXED = "has weights of its own ({}) and submodules: move the weights into a module"
"""What is wrong with a plan, and with a module that no plan names."""


class Tensor(Sharded):
    """The workload's plan over the ranks of each replica, `fully_shard` over the replicas."""

    def __init__(self, world: World, workload: Workload) -> None:
        self._world = world
        self._workload = workload
        # Only `full_state_dict` gathers weights whole: that this takes two operations needs no
        # warning on every rank.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.is_counted = world.model_rank == 0

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Split the modules that the plan names, replicate the others, and shard over the replicas;
        in place. Raises `ConfigError` if the workload has no plan, or one that does not fit this
        model.
        """
        name = type(self._workload).__name__
        plan = self._workload.tensor_plan(model, self._world.model_parallel)
        if plan is None:
            raise ConfigError(
                "train.strategy: tensor needs a plan of the model, and "
                f"{name}.tensor_plan gives none: use fsdp, or write one"
            )
        # The output of a plan's last module is a view, of which torch warns, since it must not be
        # changed in place.
        warnings.filterwarnings(
            "ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor"
        )
        mesh = self._world.mesh()
        self.replica_group = mesh["data"].get_group()
        split(model, mesh["model"], plan, who=name)
        for path, module in model.named_modules():
            replicate(module, mesh["model"], path=f"{name}.model: {path or type(module).__name__}")
        if self._world.data_size > 1:
            return self.shard(model, blocks, mesh["data"])
        self.module = model  # a single replica: nothing to gather
        return model


def split(model: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle], *, who: str) -> None:
    """Split the modules that the plan of workload `who` names over the ranks of one replica, in
    place. Raises `ConfigError` if a name matches no module, of which torch only warns.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Parallelize plan key")
        try:
            parallelize_module(model, mesh, plan)
        except UserWarning as warning:
            key = str(warning).partition("'")[2].partition("'")[0]
            raise ConfigError(f"{who}.tensor_plan {UNMATCHED.format(key)}") from None


def replicate(module: nn.Module, mesh: DeviceMesh, *, path: str) -> None:
    """Replicate a module's own weights, if the plan does not name it, as DTensors; its inputs and
    outputs stay plain tensors. Raises `ConfigError` if it has both weights of its own and
    submodules, so that plain tensors and DTensors would meet in it.
    """
    own = [
        (name, weight)
        for name, weight in module.named_parameters(recurse=False)
        if not isinstance(weight, DTensor)
    ]
    if not own:
        return
    if any(True for _ in module.children()):
        raise ConfigError(f"{path} {MIXED.format(own[0][0])}, or name this one in the plan")
    for name, weight in own:
        replicated = distribute_tensor(weight.detach(), mesh, [Replicate()])
        module.register_parameter(
            name, nn.Parameter(replicated, requires_grad=weight.requires_grad)
        )

    def distribute(_: nn.Module, inputs: Any, named: Any) -> Any:
        return tree_map_only(
            torch.Tensor,
            lambda each: (
                each
                if isinstance(each, DTensor)
                else DTensor.from_local(each, mesh, [Replicate()], run_check=False)
            ),
            (inputs, named),
        )

    def collect(_: nn.Module, __: Any, outputs: Any) -> Any:
        return tree_map_only(DTensor, lambda each: each.to_local(), outputs)

    module.register_forward_pre_hook(distribute, with_kwargs=True)
    module.register_forward_hook(collect)

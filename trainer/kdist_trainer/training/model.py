"""Builds the model of a job: mixed precision, activation checkpointing, compilation, and the
parallel strategy that wraps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kdist_trainer import parallel
from kdist_trainer.config import Training
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import ConfigError
from kdist_trainer.numerics import precision
from kdist_trainer.numerics.precision import Precision
from kdist_trainer.parallel import Strategy
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.parallel.pipeline import Pipeline
from kdist_trainer.state import separate
from kdist_trainer.training.context import Handover, KeptState
from kdist_trainer.training.optimizer import Ema
from kdist_trainer.training.workload_checks import check_model
from kdist_trainer.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model of a job: `module` is what the workload built, which is evaluated and saved;
    `wrapped` is what the strategy made of it, which is trained.
    """

    module: nn.Module
    wrapped: nn.Module
    strategy: Strategy
    precision: Precision
    ema: Ema
    buffers: Buffers


class BuiltModule(NamedTuple):
    """A model that no strategy has wrapped yet."""

    module: nn.Module
    precision: Precision


def cast_model(train: Training, workload: Workload, device: torch.device) -> BuiltModule:
    """Make the workload's model in the job's precision, on the CPU, with activation checkpointing.
    Raises `ConfigError` if the workload names no blocks and activation checkpointing needs them, or
    if there is nothing to train.
    """
    arithmetic = precision.build(train.precision, device, clip=train.clip_grad_norm)
    module = arithmetic.cast(workload.model())
    check_model(module, workload, strategy=train.strategy)
    separate(module)
    if train.activation_checkpointing == "blocks":
        blocks = workload.blocks(module)
        if not blocks:
            raise ConfigError(
                f"train.activationCheckpointing: {type(workload).__name__}.blocks names no "
                "parts of the model"
            )
        for block in blocks:
            # Set on the instance, so that names in the state do not change. Only the input of each
            # block is kept; the recomputation draws the same random numbers.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return BuiltModule(module, arithmetic)


def build_module(train: Training, workload: Workload, device: torch.device) -> BuiltModule:
    """Build the model of a strategy that has all of it on a device; needs no process group. Raises
    as `cast_model` does.
    """
    built = cast_model(train, workload, device)
    compile_(built.module.to(device), train)
    return built


def build_model(
    train: Training,
    workload: Workload,
    world: World,
    kept: KeptState | BuiltModule | None,
    *,
    handover: Handover,
    in_place: bool,
) -> Model:
    """Build the model of the job, with the same weights on every rank: rank 0 sends its own to all
    if no rank has kept any. Collective.

    `kept` has the model if this rank has trained in a former group, or has built it before.
    `in_place` says whether this rank may leave the group and continue in another one. Raises
    `ConfigError` if the strategy cannot train this model on these ranks.
    """
    strategy = parallel.build(
        train,
        workload,
        world,
        sends_weights=handover.source is None,
        is_abortable=in_place,
        buckets=None if handover.warm_up is None else handover.warm_up.buckets,
    )
    built: KeptState | BuiltModule
    if isinstance(strategy, Pipeline):
        built = cast_model(train, workload, world.device)
        # before it is moved to a device, which need not hold all of it
        wrapped = strategy.wrap(built.module, workload.chain(built.module))
        built.precision.stages = strategy.stages
        compile_(strategy.stage, train)
    else:
        built = build_module(train, workload, world.device) if kept is None else kept
        wrapped = strategy.wrap(built.module, workload.blocks(built.module))
    return Model(
        module=built.module,
        wrapped=wrapped,
        strategy=strategy,
        precision=built.precision,
        # only now: rank 0 may have sent its weights
        ema=built.ema if isinstance(built, KeptState) else Ema(built.module, train.ema_decay),
        buffers=Buffers(
            built.module,
            strategy.replica_group,
            keep_previous=in_place or train.guards_gradients,
            with_parameters=train.strategy in ("ddp", "data_parallel"),
        ),
    )


def compile_(module: nn.Module, train: Training) -> None:
    """Compile the module when it first runs, if the job asks for it."""
    if train.compile != "off":
        module.compile(backend=train.compile)

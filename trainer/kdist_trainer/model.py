"""The workload's model, made ready to train: cast, told what to compute twice, compiled, and spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from kdist_trainer import parallel, precision
from kdist_trainer.averages import Averages
from kdist_trainer.buffers import Buffers
from kdist_trainer.config import Training
from kdist_trainer.failure import ConfigProblem
from kdist_trainer.parallel import Strategy
from kdist_trainer.parallel.pipeline import Pipeline
from kdist_trainer.precision import Precision
from kdist_trainer.workload import Workload
from kdist_trainer.world import World


@dataclass(frozen=True)
class Model:
    """`module` as the workload made it, what is evaluated and saved; `wrapped` by the strategy, what is trained."""

    module: nn.Module
    wrapped: nn.Module
    strategy: Strategy
    precision: Precision
    averages: Averages | None
    buffers: Buffers


def build(train: Training, workload: Workload, world: World) -> Model:
    """The model of the job, the same weights on every rank. Collective. Raises `ConfigProblem`."""
    arithmetic = precision.build(train.precision, world.device, clip=train.clip_grad_norm)
    module = arithmetic.cast(workload.model())
    blocks = workload.blocks(module)
    if train.activation_checkpointing == "blocks":
        compute_twice(blocks, workload)
    strategy = parallel.build(train, workload, world)
    if isinstance(strategy, Pipeline):
        wrapped = strategy.wrap(module, workload.chain(module))  # before it goes to a device, which need not hold it whole
        arithmetic.stages = strategy.stages
        compile_(strategy.stage, train)
    else:
        compile_(module.to(world.device), train)
        wrapped = strategy.wrap(module, blocks)
    averages = None if train.ema_decay is None else Averages(module, train.ema_decay)
    buffers = Buffers(module, strategy.copies, keep=train.leaves_out)
    return Model(module, wrapped, strategy, arithmetic, averages, buffers)


def compile_(module: nn.Module, train: Training) -> None:
    """Have it compiled when it first computes, where the job asks for that."""
    if train.compile != "off":
        module.compile(backend=train.compile)


def compute_twice(blocks: Sequence[nn.Module], workload: Workload) -> None:
    """Keep a block's input instead of all that it computed, which the backward pass computes again.

    Raises `ConfigProblem` for a workload that names no blocks.
    """
    if not blocks:
        raise ConfigProblem(f"train.activationCheckpointing: {type(workload).__name__}.blocks names no parts of the model")
    for block in blocks:
        # On the instance, so that names in the state stay what they are; random numbers are drawn again as they were.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

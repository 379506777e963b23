"""Builds the model of a job: mixed precision, activation checkpointing, compilation, and the
parallel strategy that wraps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from kdist_trainer import parallel, precision
from kdist_trainer.config import Training
from kdist_trainer.errors import ConfigError
from kdist_trainer.parallel import Strategy
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.parallel.pipeline import Pipeline
from kdist_trainer.precision import Precision
from kdist_trainer.training.ema import Ema, NullEma
from kdist_trainer.training.kept_state import KeptState
from kdist_trainer.workload import Workload
from kdist_trainer.world import World


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model of a job: `module` is what the workload built, which is evaluated and saved;
    `wrapped` is what the strategy made of it, which is trained.
    """

    module: nn.Module
    wrapped: nn.Module
    strategy: Strategy
    precision: Precision
    ema: Ema | NullEma
    buffers: Buffers


def build_model(
    train: Training,
    workload: Workload,
    world: World,
    kept: KeptState | None = None,
    *,
    sends_weights: bool = True,
    in_place: bool = False,
) -> Model:
    """Build the model of the job, with the same weights on every rank. Collective.

    Args:
        train: Settings of the training.
        workload: The workload.
        world: The process group.
        kept: Has the model if this rank has trained in a former group.
        sends_weights: Whether rank 0 sends its weights to all; not if some ranks have kept theirs.
        in_place: Whether this rank may leave the group and continue in another one.

    Raises:
        ConfigError: If the strategy cannot train this model on these ranks.
    """
    strategy = parallel.build(
        train, workload, world, sends_weights=sends_weights, is_abortable=in_place
    )
    if kept is not None:
        wrapped = strategy.wrap(kept.module, workload.blocks(kept.module))
        return Model(
            module=kept.module,
            wrapped=wrapped,
            strategy=strategy,
            precision=kept.precision,
            ema=kept.ema,
            buffers=Buffers(kept.module, strategy.replica_group, keep_previous=True),
        )
    arithmetic = precision.build(train.precision, world.device, clip=train.clip_grad_norm)
    module = arithmetic.cast(workload.model())
    blocks = workload.blocks(module)
    if train.activation_checkpointing == "blocks":
        checkpoint_activations(blocks, workload)
    if isinstance(strategy, Pipeline):
        # before it is moved to a device, which need not hold all of it
        wrapped = strategy.wrap(module, workload.chain(module))
        arithmetic.stages = strategy.stages
        compile_(strategy.stage, train)
    else:
        compile_(module.to(world.device), train)
        wrapped = strategy.wrap(module, blocks)
    return Model(
        module=module,
        wrapped=wrapped,
        strategy=strategy,
        precision=arithmetic,
        ema=NullEma() if train.ema_decay is None else Ema(module, train.ema_decay),
        buffers=Buffers(
            module,
            strategy.replica_group,
            keep_previous=in_place or train.guards_gradients,
        ),
    )


def compile_(module: nn.Module, train: Training) -> None:
    """Compile the module when it first runs, if the job asks for it."""
    if train.compile != "off":
        module.compile(backend=train.compile)


def checkpoint_activations(blocks: Sequence[nn.Module], workload: Workload) -> None:
    """Apply activation checkpointing: keep only the input of each block and recompute it in the
    backward pass.

    Raises:
        ConfigError: If the workload names no blocks.
    """
    if not blocks:
        raise ConfigError(
            f"train.activationCheckpointing: {type(workload).__name__}.blocks names no "
            "parts of the model"
        )
    for block in blocks:
        # Set on the instance, so that names in the state do not change; the recomputation draws the
        # same random numbers.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

"""Builds everything that one rank needs to train, from train.json and the rank's environment.

`build` prepares the model: mixed precision, activation checkpointing, compilation, and the parallel
strategy that wraps it. `assemble` adds optimizer, data, checkpoints and metrics and returns the
`TrainContext` of the training loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from kdist_trainer import parallel, precision
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.config import Change, TrainConfig, Training, compare, refuse
from kdist_trainer.data import step_plan
from kdist_trainer.data.loader import Batch, Loader
from kdist_trainer.data.step_plan import DataPlan
from kdist_trainer.errors import CheckpointMismatchError, ConfigError
from kdist_trainer.instrumentation.collective_timer import CudaCollectiveTimer, GlooCollectiveTimer
from kdist_trainer.instrumentation.device_stats import DeviceStats
from kdist_trainer.instrumentation.step_timer import (
    BandwidthProbe,
    CudaAllReduceTimer,
    GlooAllReduceTimer,
    NullTimer,
    StepTimer,
    Timer,
)
from kdist_trainer.liveness import Heartbeat, Phase
from kdist_trainer.metrics.step_stats import StepPhase, StepStats
from kdist_trainer.parallel import Strategy
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.parallel.pipeline import Pipeline
from kdist_trainer.precision import Precision
from kdist_trainer.rng import WEIGHTS, Setter, derive, generators
from kdist_trainer.tensorboard import TensorBoardWriter
from kdist_trainer.training.checkpointing import (
    Stateful,
    TrainerCheckpointing,
    TrainingState,
    TrainState,
)
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.early_stopping import EarlyStopping
from kdist_trainer.training.ema import Ema
from kdist_trainer.training.forward_backward import accumulate_microbatches, run_pipeline
from kdist_trainer.training.gradient_guard import GradientGuard
from kdist_trainer.training.interval_sync import should_apply
from kdist_trainer.training.pretrained import Pretrained
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.training.sync import StopFlag, SyncExchange
from kdist_trainer.workload import LrSchedule, Workload
from kdist_trainer.world import World


@dataclass(frozen=True)
class Model:
    """The model of a job: `module` as the workload made it, which is evaluated and saved; `wrapped`
    by the strategy, which is trained.
    """

    module: nn.Module
    wrapped: nn.Module
    strategy: Strategy
    precision: Precision
    averages: Ema | None
    buffers: Buffers


def build(train: Training, workload: Workload, world: World) -> Model:
    """Build the model of the job, with the same weights on every rank. Collective. Raises
    `ConfigError`.
    """
    arithmetic = precision.build(train.precision, world.device, clip=train.clip_grad_norm)
    module = arithmetic.cast(workload.model())
    blocks = workload.blocks(module)
    if train.activation_checkpointing == "blocks":
        compute_twice(blocks, workload)
    strategy = parallel.build(train, workload, world)
    if isinstance(strategy, Pipeline):
        # before it goes to a device, which need not hold it whole
        wrapped = strategy.wrap(module, workload.chain(module))
        arithmetic.stages = strategy.stages
        compile_(strategy.stage, train)
    else:
        compile_(module.to(world.device), train)
        wrapped = strategy.wrap(module, blocks)
    averages = None if train.ema_decay is None else Ema(module, train.ema_decay)
    buffers = Buffers(module, strategy.copies, keep=train.leaves_out)
    return Model(module, wrapped, strategy, arithmetic, averages, buffers)


def compile_(module: nn.Module, train: Training) -> None:
    """Compile the module when it first runs, if the job asks for it."""
    if train.compile != "off":
        module.compile(backend=train.compile)


def compute_twice(blocks: Sequence[nn.Module], workload: Workload) -> None:
    """Apply activation checkpointing: keep only the input of each block and recompute it in the
    backward pass.

    Raises `ConfigError` for a workload that names no blocks.
    """
    if not blocks:
        raise ConfigError(
            f"train.activationCheckpointing: {type(workload).__name__}.blocks names no "
            "parts of the model"
        )
    for block in blocks:
        # On the instance, so that names in the state stay what they are; random numbers are drawn
        # again as they were.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@dataclass(frozen=True, kw_only=True)
class RankRuntime:
    """The environment of a rank: its process group, its agent, and its folders."""

    world: World
    flag: StopFlag
    stats: StepStats
    report: Callable[[], None]
    """Sends `stats` to the agent, not more often than is of use."""
    flush: Callable[[], None]
    """Sends them in any case."""
    heartbeat: Heartbeat | None
    checkpoints: Path | None


def assemble(
    config: TrainConfig, train: Training, workload: Workload, around: RankRuntime
) -> TrainContext:
    """Build the training context of one rank, before anything is restored. Collective.

    Raises `ConfigError` or `DataError` for what cannot be trained, and whatever the workload's own
    code raises.
    """
    world, stats = around.world, around.stats
    set_generators = seed_generators(train, world)
    built = build(train, workload, world)
    planned = step_plan.plan(config, train, workload, world, even=built.strategy.sharded)
    steps = planned.steps
    guard, patience = build_guards(train)
    parts = _make_training_state(train, workload, world, built, planned, guard, patience)
    laps = StepTimer(stats)
    loader = Loader(steps, workload, planned.samples, settings=train.loader, seed=train.seed)
    run = TrainContext(
        settings=train,
        world=world,
        workload=workload,
        module=built.module,
        model=built.wrapped,
        strategy=built.strategy,
        buffers=built.buffers,
        optimizer=parts.optimizer,
        move_rate=parts.scheduler.step if parts.scheduler is not None else _stay,
        curve=parts.scheduler if isinstance(parts.scheduler, LrSchedule) else None,
        precision=built.precision,
        set_generators=set_generators,
        learn=run_pipeline if train.strategy == "pipeline" else accumulate_microbatches,
        weigh=build_loss_scale(workload, world, laps),
        loader=loader,
        evaluation_batch=train.micro_batch or max(1, train.global_batch // steps.deal.shards),
        state=parts.state,
        target=steps.count(),
        saves=make_saves(config, train, around, parts, stream=planned.is_stream),
        pretrained=make_pretrained(train, workload, parts),
        guard=guard,
        averages=built.averages,
        patience=patience,
        flag=around.flag,
        exchange=_make_exchange(train, world, built.strategy),
        stats=stats,
        resources=DeviceStats(stats, world.device, train, waiting=loader.waiting),
        curves=_make_curves(train, around),
        laps=laps,
        timer=make_timer(train, around, laps),
        probe=make_probe(train, around),
        report=around.report,
        flush=around.flush,
        beat=around.heartbeat.beat if around.heartbeat is not None else _no_beat,
    )
    run.admit = partial(should_apply, run) if guard is not None else None
    return run


def _make_training_state(
    train: Training,
    workload: Workload,
    world: World,
    built: Model,
    planned: DataPlan,
    guard: GradientGuard | None,
    patience: EarlyStopping | None,
) -> TrainingState:
    """Make the optimizer and the scheduler; returns all that a checkpoint holds."""
    optimizer = make_optimizer(train, workload, built)
    scheduler = workload.scheduler(optimizer, train.schedule, steps=planned.steps.count())
    small = drop_none(
        precision=built.precision, guard=guard, early_stop=patience, buffers=built.buffers
    )
    environment = environment_fingerprint(train, world)
    state = TrainState(train.seed, planned.fingerprint, world.size, environment)
    return TrainingState(
        world, built.strategy, built.module, optimizer, scheduler, built.averages, small, state
    )


def _make_exchange(train: Training, world: World, strategy: Strategy) -> SyncExchange:
    return SyncExchange(world, most_steps=train.sync_every_steps, counts=strategy.counts)


def _make_curves(train: Training, around: RankRuntime) -> TensorBoardWriter:
    """The writer of event files, which writes on the leader only, and only if the job asks."""
    writes = train.tensorboard == "scalars" and around.world.is_leader
    return TensorBoardWriter(around.checkpoints if writes else None, around.stats)


def seed_generators(train: Training, world: World) -> Setter:
    """Seed every generator for the initial weights; returns the function that seeds them again."""
    set_generators = generators(world.device)
    set_generators(derive(train.seed, WEIGHTS))
    return set_generators


def make_optimizer(train: Training, workload: Workload, built: Model) -> Optimizer:
    """The workload's optimizer. Its parameter groups record their initial learning rate, since a
    schedule may be added or changed later.
    """
    optimizer = workload.optimizer(built.module, train.optimizer)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def build_guards(train: Training) -> tuple[GradientGuard | None, EarlyStopping | None]:
    """The gradient guard and early stopping, where the job asks for them."""
    guard = GradientGuard(train) if train.leaves_out else None
    return guard, EarlyStopping(train.early_stop) if train.early_stop is not None else None


def make_saves(
    config: TrainConfig, train: Training, around: RankRuntime, parts: TrainingState, *, stream: bool
) -> TrainerCheckpointing:
    """The checkpointing of the run: the checkpoint folder, locked for this run, and the ledger in
    it. Collective.
    """
    root, store, world = around.checkpoints, None, around.world
    if root is not None:
        store = CheckpointManager(
            root,
            world=world,
            run_id=os.environ.get("KDIST_RUN_ID", "none"),
            config=train.checkpoint,
            job=config.to_job(),
            sharded=parts.strategy.sharded,
            holders=(world.data_rank, world.data_size) if train.strategy == "pipeline" else None,
            take_over="KDIST_TAKE_OVER" in os.environ,
        )
    diary = StepLog(root, around.world, waited=lambda: around.stats.phase[StepPhase.COMM_EXPOSED])
    judge = partial(judge_edits, train.model_dump(mode="json", by_alias=True), stream=stream)
    return TrainerCheckpointing(
        store, parts, every=train.checkpoint.every, diary=diary, stats=around.stats, judge=judge
    )


def judge_edits(now: dict[str, Any], job: Mapping[str, Any], *, stream: bool) -> list[Change]:
    """The fields that were edited since a checkpoint of `job` was written. Raises
    `CheckpointMismatchError` if `now` cannot continue from it.
    """
    changes = compare(job["train"], now, stream=stream) if "train" in job else []
    problem = refuse(changes)
    if problem is not None:
        raise CheckpointMismatchError(problem)
    return changes


def make_pretrained(train: Training, workload: Workload, parts: TrainingState) -> Pretrained | None:
    """The pretrained weights, if the job names some."""
    if train.init is None:
        return None
    return Pretrained(
        train.init, workload.context.data, train.checkpoint.load == "broadcast", parts
    )


def drop_none(**parts: Stateful | None) -> dict[str, Stateful]:
    """The parts that this run has, by name."""
    return {name: part for name, part in parts.items() if part is not None}


def make_timer(train: Training, around: RankRuntime, laps: StepTimer) -> Timer:
    """The timer of collectives for this job, strategy and device."""
    if train.collective_timing == "off" or around.world.size == 1:
        return NullTimer()
    on_device = around.world.device.type == "cuda"
    if train.strategy != "ddp":
        return (
            CudaCollectiveTimer(around.stats)
            if on_device
            else GlooCollectiveTimer(around.stats, laps)
        )
    kind = CudaAllReduceTimer if on_device else GlooAllReduceTimer
    return kind(around.stats, around.heartbeat)


def make_probe(train: Training, around: RankRuntime) -> BandwidthProbe:
    """The probe of the bandwidth between the ranks; disabled if the job turns timing off."""
    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - the world is open
    return BandwidthProbe(
        around.stats, group, around.world.device, enabled=train.collective_timing == "on"
    )


def build_loss_scale(workload: Workload, world: World, laps: StepTimer) -> Callable[[Batch], float]:
    """The function that weights a step's losses. A strategy averages over copies, but the losses
    have to be summed.
    """
    units, copies = workload.units_per_sample, world.data_size
    if units is not None:
        return lambda batch: copies / (units * batch.samples)

    def count_together(batch: Batch) -> float:
        own = sum(workload.count(piece.batch) for piece in batch.pieces if piece.samples)
        total = torch.tensor(own, dtype=torch.int64, device=world.device)
        laps.lap(StepPhase.FORWARD)
        dist.all_reduce(total)  # in which every rank of a copy counts the same samples
        laps.lap(StepPhase.COMM_EXPOSED)  # for all ranks wait here for the slowest
        return world.size / max(1, int(total))

    return count_together


def environment_fingerprint(train: Training, world: World) -> str:
    """What must be equal besides the world size for bitwise equal results; `ddp` is the default and
    not named.
    """
    copies = f" with {world.data_size} copies" if world.model_parallel > 1 else ""
    spread = "" if train.strategy == "ddp" else f"{train.strategy}{copies}, "
    return f"{spread}{describe_machine(world)}"


def describe_machine(world: World) -> str:
    """The machine's part of the fingerprint."""
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}"


def _stay() -> None:
    """Leave the learning rate as it is."""


def _no_beat(phase: Phase, step: int) -> None:
    """Do nothing: this rank has no heartbeat."""

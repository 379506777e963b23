"""Builds everything that one rank needs to train, from train.json and the rank's environment.

`assemble` builds model, optimizer, data, checkpoints and metrics, and returns the `TrainContext` of
the training loop. `as_new_process` builds once more what a new process of the job would have, to
prove that it could load this one's state, and leaves no trace: generators, and the globals of the
workload's module, are restored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.interval import SaveClock, make_interval
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import TrainConfig, Training
from kdist_trainer.data import step_plan
from kdist_trainer.data.loader import Loader
from kdist_trainer.data.step_plan import DataPlan
from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation.device_stats import DeviceStats
from kdist_trainer.instrumentation.step_timer import (
    BandwidthProbe,
    CollectiveTimer,
    CudaAllReduceTimer,
    CudaCollectiveTimer,
    GlooAllReduceTimer,
    GlooCollectiveTimer,
    StepTimer,
)
from kdist_trainer.metrics.rank_metrics import StepPhase, StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.numerics.rng import WEIGHTS, Generators, GeneratorStates, derive
from kdist_trainer.object_store.store import ObjectPath
from kdist_trainer.parallel.ddp import Replicated
from kdist_trainer.parallel.pipeline import Pipeline
from kdist_trainer.processes.liveness import Heartbeat, NullHeartbeat
from kdist_trainer.training import regroup
from kdist_trainer.training.checkpointing import TrainerCheckpointing, find_edits
from kdist_trainer.training.context import (
    Handover,
    KeptState,
    StepProfiler,
    TensorBoard,
    TrainContext,
)
from kdist_trainer.training.evaluation import EarlyStopping
from kdist_trainer.training.forward_backward import (
    ForwardBackward,
    GradientAccumulation,
    LossScale,
    PipelinePasses,
)
from kdist_trainer.training.gradient_guard import GradientGuard
from kdist_trainer.training.model import Model, build_model, cast_model
from kdist_trainer.training.optimizer import Ema, make_optimizer
from kdist_trainer.training.pretrained import Pretrained
from kdist_trainer.training.regroup import PreparedTraining
from kdist_trainer.training.step_log import StepLog
from kdist_trainer.training.sync import StopFlag, SyncExchange
from kdist_trainer.training.training_state import (
    Stateful,
    TrainingState,
    TrainState,
    describe_environment,
)
from kdist_trainer.training.workload_checks import find_scheduler_problem, refuse
from kdist_trainer.workload import Workload

Extras = dict[str, Stateful]


def find_slice(module: str) -> Any:
    """The module of an optional part; None if it is not installed. Imported when this module is,
    since ranks are forked from a process that has imported it.
    """
    try:
        return import_module(f"kdist_trainer.{module}")
    except ModuleNotFoundError as error:
        if error.name not in (f"kdist_trainer.{module}", f"kdist_trainer.{module.split('.')[0]}"):
            raise
        return None


_tensorboard, _profiling = find_slice("tensorboard.writer"), find_slice("profiling.recorder")


@dataclass(frozen=True, kw_only=True)
class RankRuntime:
    """The environment of a rank: its process group, its agent, and its folders."""

    world: World
    stop_flag: StopFlag
    stats: StepStats
    reporter: Reporter
    """Sends `stats` to the agent."""
    heartbeat: Heartbeat | NullHeartbeat = field(default_factory=NullHeartbeat)
    checkpoints: StoragePath | None = None
    """Checkpoint folder; None to save nothing."""
    scratch: Path | None = None
    """Folder of the agent, where profile requests arrive."""


def assemble(
    config: TrainConfig,
    train: Training,
    workload: Workload,
    runtime: RankRuntime,
    kept: KeptState | None = None,
    prepared: PreparedTraining | None = None,
) -> TrainContext:
    """Build the training context of one rank, before anything is restored. Collective.

    `kept` is the training of this rank in its former group, `prepared` what it has built before it
    had a group.

    Raises:
        ConfigError: If the job cannot be trained on these ranks.
        DataError: If there are no samples.
    """
    world, stats = runtime.world, runtime.stats
    model, handover = make_model(train, workload, world, kept, prepared)
    opened = None if (before := prepared or kept) is None else before.samples
    even = model.strategy.sharded
    data = step_plan.plan(config, train, workload, world, even=even, opened=opened)
    guard = GradientGuard(train) if kept is None else kept.guard
    keep = train.checkpoint.keep.best
    early_stopping = EarlyStopping(train.early_stop, keep) if kept is None else kept.early_stopping
    extras: Extras = {"precision": model.precision}
    if train.guards_gradients:
        extras["guard"] = guard
    if train.early_stop is not None or keep is not None:
        extras["early_stop"] = early_stopping
    extras["buffers"] = model.buffers
    training = make_training_state(train, workload, world, model, data, extras, kept)
    state, step_timer = training.state, StepTimer(stats)
    folder = runtime.checkpoints
    step_log = StepLog(
        folder,
        world,
        waited=lambda: stats.phase[StepPhase.COMM_EXPOSED],
        keeps_lines=regroup.is_possible(train, world),
    )
    loader = Loader(data.steps, workload, data.samples, settings=train.loader, seed=train.seed)
    assert dist.group.WORLD is not None  # noqa: S101 - the world is open
    return TrainContext(
        settings=train,
        world=world,
        workload=workload,
        module=model.module,
        model=model.wrapped,
        strategy=model.strategy,
        buffers=model.buffers,
        precision=model.precision,
        forward_backward=make_forward_backward(workload, model, state, step_timer),
        loss_scale=LossScale(workload, world, step_timer),
        optimizer=training.optimizer,
        lr_scheduler=training.scheduler,
        ema=model.ema,
        guard=guard,
        early_stopping=early_stopping,
        loader=loader,
        evaluation_batch=train.micro_batch  # or what a shard has of a full step
        or max(1, train.global_batch // data.steps.assignment.shards),
        state=state,
        handover=handover,
        checkpointing=make_checkpoints(config, train, runtime, training, data, step_log, handover),
        pretrained=None
        if train.init is None
        else Pretrained(
            train.init,
            workload.context.data,
            train.checkpoint.load == "broadcast",
            training,
            Path(fetched) if (fetched := os.environ.get("KDIST_INIT")) else None,
        ),
        step_log=step_log,
        stop_flag=runtime.stop_flag,
        sync_exchange=SyncExchange(
            world, max_steps=train.sync_every_steps, is_counted=model.strategy.is_counted
        ),
        stats=stats,
        device_stats=DeviceStats(stats, world.device, train, waiting=loader.prefetched),
        step_timer=step_timer,
        collective_timer=make_collective_timer(train, runtime, step_timer),
        bandwidth_probe=BandwidthProbe(
            stats, dist.group.WORLD, world.device, enabled=train.collective_timing == "on"
        ),
        reporter=runtime.reporter,
        heartbeat=runtime.heartbeat,
        tensorboard=TensorBoard()
        if _tensorboard is None or train.tensorboard == "off" or not world.is_rank_zero
        else _tensorboard.TensorBoardWriter(folder, stats),
        profiler=StepProfiler()
        if _profiling is None
        else _profiling.Profiler(
            world,
            state,
            stats,
            step_timer,
            scratch=runtime.scratch,
            checkpoints=None if isinstance(folder, ObjectPath) else folder,
        ),
    )


def make_model(
    train: Training,
    workload: Workload,
    world: World,
    kept: KeptState | None,
    prepared: PreparedTraining | None,
) -> tuple[Model, Handover]:
    """The model, and how the ranks come by the state of their former group. Collective."""
    if prepared is None:
        Generators.all(world.device).seed(derive(train.seed, WEIGHTS))
    else:
        prepared.generators.restore()
    in_place = regroup.is_possible(train, world)
    handover = regroup.plan_handover(world, kept) if in_place else Handover()
    built = kept if prepared is None else prepared.built
    model = build_model(train, workload, world, built, handover=handover, in_place=in_place)
    return model, handover


def make_training_state(
    train: Training,
    workload: Workload,
    world: World,
    model: Model,
    data: DataPlan,
    extras: Extras,
    kept: KeptState | None,
) -> TrainingState:
    """Make the optimizer and the scheduler, or take those that this rank has kept of a former
    group, and collect all that a checkpoint holds.
    """
    environment = describe_environment(train, world)
    state = TrainState(train.seed, data.fingerprint, world.size, environment)
    if kept is not None:
        model.buffers.exclude(kept.training.optimizer)
        return replace(
            kept.training, world=world, strategy=model.strategy, extras=extras, state=state
        )
    optimizer = make_optimizer(train, workload, model.module)
    model.buffers.exclude(optimizer)
    steps = data.steps.count()
    scheduler = workload.scheduler(optimizer, train.schedule, steps=steps)
    refuse(find_scheduler_problem(scheduler), workload)
    training = TrainingState(
        world=world,
        strategy=model.strategy,
        module=model.module,
        optimizer=optimizer,
        scheduler=scheduler,
        ema=model.ema,
        extras=extras,
        state=state,
    )
    # the rank keeps it in all its groups, and the buffers know this one
    bare = replace(training, extras={})
    training.loading.build = partial(as_new_process, train, workload, bare, steps=steps)
    return training


def make_forward_backward(
    workload: Workload, model: Model, state: TrainState, step_timer: StepTimer
) -> ForwardBackward:
    """The forward and backward passes of the strategy."""
    common: dict[str, Any] = {
        "workload": workload,
        "model": model.wrapped,
        "precision": model.precision,
        "buffers": model.buffers,
        "generators": Generators.all(workload.context.device),
        "state": state,
        "step_timer": step_timer,
    }
    if isinstance(model.strategy, Pipeline):
        return PipelinePasses(**common, strategy=model.strategy)
    return GradientAccumulation(**common, strategy=model.strategy)


def make_checkpoints(
    config: TrainConfig,
    train: Training,
    runtime: RankRuntime,
    training: TrainingState,
    data: DataPlan,
    step_log: StepLog,
    handover: Handover,
) -> TrainerCheckpointing:
    """The checkpointing of the run: locks the checkpoint folder for it. Collective."""
    manager, world = None, runtime.world
    if runtime.checkpoints is not None:
        manager = CheckpointManager(
            runtime.checkpoints,
            world=world,
            run_id=os.environ.get("KDIST_RUN_ID", "none"),
            config=train.checkpoint,
            job=config.to_job(),
            sharded=training.strategy.sharded,
            holders=(world.data_rank, world.data_size) if train.strategy == "pipeline" else None,
            take_over="KDIST_TAKE_OVER" in os.environ,
            is_known=handover.source is not None,
            spared=handover.carried,
        )
    settings = train.model_dump(mode="json", by_alias=True)
    return TrainerCheckpointing(
        manager,
        training,
        every=train.checkpoint.every,
        step_log=step_log,
        stats=runtime.stats,
        find_edits=partial(find_edits, settings, is_stream=data.is_stream),
        clock=SaveClock.from_environment(make_interval(train.checkpoint.every)),
        carried=None if handover.kept is None else handover.kept.carried,
        stop_flag=runtime.stop_flag,
        heartbeat=runtime.heartbeat,
        reporter=runtime.reporter,
    )


def make_collective_timer(
    train: Training, runtime: RankRuntime, step_timer: StepTimer
) -> CollectiveTimer:
    """The timer of collectives for this job, strategy and device."""
    if train.collective_timing == "off" or runtime.world.size == 1:
        return CollectiveTimer()
    stats, on_device = runtime.stats, runtime.world.device.type == "cuda"
    if train.strategy != "ddp":
        return CudaCollectiveTimer(stats) if on_device else GlooCollectiveTimer(stats, step_timer)
    heartbeat = runtime.heartbeat if isinstance(runtime.heartbeat, Heartbeat) else None
    return (CudaAllReduceTimer if on_device else GlooAllReduceTimer)(stats, heartbeat)


@contextmanager
def as_new_process(
    train: Training, workload: Workload, training: TrainingState, *, steps: int
) -> Iterator[TrainingState | None]:
    """Within the `with` block, what a new process of this training has, on the CPU. None if the
    user's code raises when it is called once more.
    """
    with _without_trace(workload, training.world.device):
        fresh: TrainingState | None = None
        with suppress(Exception):  # the user's code may raise anything
            other = type(workload)(workload.context)
            module = cast_model(train, other, training.world.device).module
            strategy = Replicated()
            strategy.module = module
            optimizer = make_optimizer(train, other, module)
            fresh = replace(
                training,
                strategy=strategy,
                module=module,
                optimizer=optimizer,
                scheduler=other.scheduler(optimizer, train.schedule, steps=steps),
                ema=Ema(module, train.ema_decay),
            )
        yield fresh


@contextmanager
def _without_trace(workload: Workload, device: torch.device) -> Iterator[None]:
    """Undo what user code in the `with` block does to the process: to generators, settings, and the
    attributes of the workload's classes and of their modules.
    """
    generators = GeneratorStates.read()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    classes = [
        one
        for one in type(workload).__mro__
        if one.__module__.partition(".")[0] not in ("builtins", "abc", "kdist_trainer")
    ]
    modules = [sys.modules[name] for name in {c.__module__ for c in classes} & sys.modules.keys()]
    owners: list[Any] = [*classes, *modules]
    namespaces = [(one, dict(vars(one))) for one in owners]
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        generators.restore()
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        for owner, before in namespaces:
            now = dict(vars(owner))
            for name in now.keys() - before.keys():
                delattr(owner, name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    setattr(owner, name, value)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

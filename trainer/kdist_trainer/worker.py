"""One rank: joins the group, loads the workload, trains. `main` is what an agent starts, by torchrun's environment."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from pathlib import Path

import torch

from kdist_trainer import failure, lifeline, log, loop, precision, workloads
from kdist_trainer.config import TrainConfig, Training
from kdist_trainer.data.loader import Steps, batches, fetcher
from kdist_trainer.data.order import Deal, Order
from kdist_trainer.failure import ConfigProblem
from kdist_trainer.heartbeat import Heartbeat
from kdist_trainer.parallel.ddp import Ddp
from kdist_trainer.randomness import WEIGHTS, derive, generators
from kdist_trainer.run import Run
from kdist_trainer.signals import Exchange, StopFlag
from kdist_trainer.state import TrainState
from kdist_trainer.stats import StepStats
from kdist_trainer.timing import Laps
from kdist_trainer.workload import WorkloadContext
from kdist_trainer.world import World


def main() -> str:
    """Train as one rank of the group that the environment describes; returns "done" or "stopped".

    Raises what ended the training, after leaving it where the agent looks for it.
    """
    if "KDIST_LIFELINE" in os.environ:
        lifeline.watch(Path(os.environ["KDIST_LIFELINE"]))
    flag = StopFlag()
    flag.install()
    try:
        config = TrainConfig.read(Path(os.environ["KDIST_CONFIG"]))
        assert config.train is not None
        torch.set_num_threads(config.threads_per_rank)
        with World.from_environment(timeout_seconds=config.collective_timeout_seconds) as world:
            log.bind(rank=world.rank, generation=world.generation)
            run = prepare(config, config.train, world, flag)
            return loop.train(run)
    except BaseException as error:
        failure.record(error)
        raise


def prepare(config: TrainConfig, train: Training, world: World, flag: StopFlag) -> Run:
    data = {mount: Path(path) for mount, path in json.loads(os.environ.get("KDIST_DATA", "{}")).items()}
    workload = workloads.load(train.workload)(WorkloadContext(train.options, data, train.seed, world.device))
    set_generators = generators(world.device)
    set_generators(derive(train.seed, WEIGHTS))
    module = workload.model().to(world.device)
    samples = workload.dataset("train")
    shards = train.virtual_shards or config.max_world_size(world.local_size)
    deal = Deal(train.global_batch, shards, world.rank, world.size, train.micro_batch)
    total = train.epochs * len(samples) if train.epochs else (train.steps or 0) * train.global_batch
    steps = Steps(Order(length=len(samples), seed=train.seed), deal, total=total, seed=train.seed)
    strategy = Ddp(world, bucket_mib=train.bucket_mib)
    model = strategy.wrap(module)
    optimizer = workload.optimizer(module, train.optimizer)
    scheduler = workload.scheduler(optimizer, train.schedule, steps=steps.count())
    state = TrainState(seed=train.seed, fingerprint=workload.fingerprint(samples))
    stats = StepStats(rank=world.rank, generation=world.generation)
    return Run(
        settings=train,
        world=world,
        workload=workload,
        samples=samples,
        strategy=strategy,
        model=model,
        optimizer=optimizer,
        move_rate=scheduler.step if scheduler else lambda: None,
        precision=precision.build(train.precision, world.device, clip=train.clip_grad_norm),
        set_generators=set_generators,
        state=state,
        steps=steps,
        target=steps.count(),
        batches=batches(steps, fetcher(workload, samples), step=0, position=0, move=workload.to_device),
        exchange=Exchange(world, most_steps=train.sync_every_steps),
        flag=flag,
        stats=stats,
        laps=Laps(stats),
        boundary=1,
    )

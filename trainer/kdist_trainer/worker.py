"""One rank: joins the group, loads the workload, trains. `main` is what an agent starts in torchrun's environment.

By hand, one rank without an agent:  KDIST_CONFIG=train.json python -c 'from kdist_trainer.worker import main; main()'
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from kdist_trainer import failure, log, loop, preflight, recorder, workloads
from kdist_trainer.assembly import Surroundings, assemble
from kdist_trainer.config import Nodes, TrainConfig, Training
from kdist_trainer.failure import ConfigProblem
from kdist_trainer.heartbeat import Heartbeat, Phase
from kdist_trainer.profiling import recording as profiling
from kdist_trainer.reporter import Reporter
from kdist_trainer.run import Run
from kdist_trainer.signals import StopFlag
from kdist_trainer.stats import StepStats
from kdist_trainer.workload import Workload, WorkloadContext
from kdist_trainer.world import World


def main() -> str:
    """Train as one rank of the group that the environment describes; returns "done" or "stopped".

    Raises what ended the training, after leaving it where the agent looks for it.
    """
    flag, heartbeat, run = StopFlag(), recorder.find_heartbeat(), None
    flag.install()
    try:
        config = read_config(Path(os.environ["KDIST_CONFIG"]))
        train = config.train
        if train is None:
            raise ConfigProblem("train.json has no train section: a script is not started by this entrypoint")
        torch.set_num_threads(config.threads_per_rank)
        beat(heartbeat, Phase.RENDEZVOUS)
        recorder.note_collectives(heartbeat)
        with open_world(config, train) as world:
            beat(heartbeat, Phase.INIT)
            log.bind(rank=world.rank, generation=world.generation)
            if config.preflight is not None and config.preflight.all_reduce is not None:
                node = os.environ.get("KDIST_NODE", "")
                preflight.check(config.preflight.all_reduce, world, node=node, beat=lambda: beat(heartbeat, Phase.INIT))
            stats = StepStats(rank=world.rank, generation=world.generation)
            with Reporter(stats) as reporter:
                around = Surroundings(
                    world=world,
                    flag=flag,
                    stats=stats,
                    report=reporter.send,
                    flush=reporter.flush,
                    heartbeat=heartbeat,
                    checkpoints=Path(os.environ["KDIST_CHECKPOINTS"]) if "KDIST_CHECKPOINTS" in os.environ else None,
                )
                run = assemble(config, train, load_workload(train, world), around)
                scratch = Path(os.environ["KDIST_SCRATCH"]) if "KDIST_SCRATCH" in os.environ else None
                profiling.attach(run, scratch=scratch, checkpoints=around.checkpoints)
                outcome = loop.train(run)
            beat(heartbeat, Phase.EXIT)
            return outcome
    except BaseException as error:
        record(error, heartbeat, run)
        raise


def open_world(config: TrainConfig, train: Training) -> World:
    """The group that this rank belongs to. Raises `ConfigProblem` for a size that the job cannot use."""
    return World.from_environment(timeout_seconds=config.collective_timeout_seconds, model_parallel=train.model_parallel or 1)


def read_config(path: Path) -> TrainConfig:
    """`train.json`, with the bounds that this group goes by. Raises `ConfigProblem` for one that cannot be read."""
    try:
        config = TrainConfig.read(path)
        least, colon, most = os.environ.get("KDIST_NODES", "").partition(":")
        return config.model_copy(update={"nodes": Nodes(min=int(least), max=int(most))}) if colon else config
    except (OSError, ValueError) as error:
        raise ConfigProblem(f"{path}: {error}") from error


def load_workload(train: Training, world: World) -> Workload:
    """The workload that the job names, with what it is told."""
    data = {mount: Path(path) for mount, path in json.loads(os.environ.get("KDIST_DATA", "{}")).items()}
    return workloads.load(train.workload)(WorkloadContext(train.options, data, train.seed, world.device))


def beat(heartbeat: Heartbeat | None, phase: Phase) -> None:
    """Say where this rank is, between start and training."""
    if heartbeat is not None:
        heartbeat.beat(phase, heartbeat.read().step)


def record(error: BaseException, heartbeat: Heartbeat | None, run: Run | None) -> None:
    """Leave the failure for the agent, with the step and the collective that this rank was in."""
    collective = heartbeat.read().collective if heartbeat is not None else None
    failure.record(error, step=run.state.step if run is not None else None, collective=collective)

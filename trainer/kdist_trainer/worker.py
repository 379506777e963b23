"""One rank of a managed training: joins the process group, checks the network, loads the workload
and trains. `main` is what an agent starts in torchrun's environment.

The network check (`spec.preflight`) runs in every new worker group, since after a restart the ranks
may be on other machines. It uses the fastest of a few rounds, so a moment's slowness ends no job.

By hand, one rank without an agent:  KDIST_CONFIG=train.json python -c 'from kdist_trainer.worker
import main; main()'
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from kdist_trainer import errors, log, workloads
from kdist_trainer.bench.collectives import COLLECTIVES
from kdist_trainer.bench.measure import Effort, Exchange, SlowLink, judge_pairs, measure
from kdist_trainer.config import AllReduceCheck, Nodes, TrainConfig, Training, count_bytes
from kdist_trainer.errors import BandwidthError, ConfigError
from kdist_trainer.instrumentation import flight_recorder
from kdist_trainer.liveness import Heartbeat, Phase
from kdist_trainer.metrics.reporter import Reporter
from kdist_trainer.metrics.step_stats import StepStats
from kdist_trainer.training import profiler as profiling
from kdist_trainer.training import trainer
from kdist_trainer.training.builder import RankRuntime, assemble
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.sync import StopFlag
from kdist_trainer.workload import Workload, WorkloadContext
from kdist_trainer.world import World

_EFFORT = Effort(rounds=10, warmup=2, seconds=20.0)
_SLOW_FACTOR = 2.0


def check(
    wanted: AllReduceCheck,
    world: World,
    *,
    node: str,
    beat: Callable[[], object],
    exchange: Exchange | None = None,
) -> None:
    """Measure the all-reduce that the job demands. Collective.

    Raises `BandwidthError` where the ranks do not reach it: first on the rank that is slow, as far
    as one is.
    """
    if world.size == 1:
        return
    collective = COLLECTIVES["all_reduce"]
    row = measure(collective, count_bytes(wanted.size), world, _EFFORT, beat=beat)
    reached, demanded = (
        row.size / row.fastest * collective.factor(world.size),
        count_bytes(wanted.min_bus_bandwidth),
    )
    if world.is_leader:
        log.event(
            "preflight", busbw=round(reached), demanded=demanded, size=row.size, ranks=world.size
        )
    if reached >= demanded:
        return
    _, slow = judge_pairs(world, _SLOW_FACTOR, beat=beat, exchange=exchange)
    nodes = world.all_gather_object(node)
    if world.rank != (slow.ranks[0] if slow is not None else 0):
        world.barrier()  # the rank to blame speaks first, and this one ends with it
    raise BandwidthError(
        f"an all-reduce of {wanted.size} among {world.size} ranks reaches a bus bandwidth "
        f"of {reached / 1e9:.3g} GB/s, "
        f"spec.preflight.allReduce.minBusBandwidth demands {wanted.min_bus_bandwidth} "
        f"({demanded / 1e9:.3g} GB/s); " + _name(slow, nodes)
    )


def _name(slow: SlowLink | None, nodes: list[str]) -> str:
    if slow is None:
        return "no pair of ranks is slower than the others"
    who = " and ".join(f"rank {rank} on {nodes[rank]}" for rank in slow.ranks)
    what = "the pair " if len(slow.ranks) > 1 else ""
    return f"slow is {what}{who}: {slow.ratio:.1f} times the median of the others"


def main() -> str:
    """Train as one rank of the group that the environment describes; returns "done" or "stopped".

    Raises what ended the training, after leaving it where the agent looks for it.
    """
    flag, heartbeat, run = StopFlag(), flight_recorder.find_heartbeat(), None
    flag.install()
    try:
        config = read_config(Path(os.environ["KDIST_CONFIG"]))
        train = config.train
        if train is None:
            raise ConfigError(
                "train.json has no train section: a script is not started by this entrypoint"
            )
        torch.set_num_threads(config.threads_per_rank)
        beat(heartbeat, Phase.RENDEZVOUS)
        flight_recorder.note_collectives(heartbeat)
        with open_world(config, train) as world:
            beat(heartbeat, Phase.INIT)
            log.bind(rank=world.rank, generation=world.generation)
            if config.preflight is not None and config.preflight.all_reduce is not None:
                node = os.environ.get("KDIST_NODE", "")
                check(
                    config.preflight.all_reduce,
                    world,
                    node=node,
                    beat=lambda: beat(heartbeat, Phase.INIT),
                )
            stats = StepStats(rank=world.rank, generation=world.generation)
            with Reporter(stats) as reporter:
                around = RankRuntime(
                    world=world,
                    flag=flag,
                    stats=stats,
                    report=reporter.send,
                    flush=reporter.flush,
                    heartbeat=heartbeat,
                    checkpoints=Path(os.environ["KDIST_CHECKPOINTS"])
                    if "KDIST_CHECKPOINTS" in os.environ
                    else None,
                )
                run = assemble(config, train, load_workload(train, world), around)
                scratch = (
                    Path(os.environ["KDIST_SCRATCH"]) if "KDIST_SCRATCH" in os.environ else None
                )
                profiling.attach(run, scratch=scratch, checkpoints=around.checkpoints)
                outcome = trainer.train(run)
            beat(heartbeat, Phase.EXIT)
            return outcome
    except BaseException as error:
        record(error, heartbeat, run)
        raise


def open_world(config: TrainConfig, train: Training) -> World:
    """The group that this rank belongs to. Raises `ConfigError` for a size that the job cannot
    use.
    """
    return World.from_environment(
        timeout_seconds=config.collective_timeout_seconds, model_parallel=train.model_parallel or 1
    )


def read_config(path: Path) -> TrainConfig:
    """`train.json`, with the bounds that this group goes by. Raises `ConfigError` for one that
    cannot be read.
    """
    try:
        config = TrainConfig.read(path)
        least, colon, most = os.environ.get("KDIST_NODES", "").partition(":")
        return (
            config.model_copy(update={"nodes": Nodes(min=int(least), max=int(most))})
            if colon
            else config
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def load_workload(train: Training, world: World) -> Workload:
    """The workload that the job names, with what it is told."""
    data = {
        mount: Path(path) for mount, path in json.loads(os.environ.get("KDIST_DATA", "{}")).items()
    }
    return workloads.load(train.workload)(
        WorkloadContext(train.options, data, train.seed, world.device)
    )


def beat(heartbeat: Heartbeat | None, phase: Phase) -> None:
    """Say where this rank is, between start and training."""
    if heartbeat is not None:
        heartbeat.beat(phase, heartbeat.read().step)


def record(error: BaseException, heartbeat: Heartbeat | None, run: TrainContext | None) -> None:
    """Leave the failure for the agent, with the step and the collective that this rank was in."""
    collective = heartbeat.read().collective if heartbeat is not None else None
    errors.record(error, step=run.state.step if run is not None else None, collective=collective)

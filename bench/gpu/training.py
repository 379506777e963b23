"""The training of `gpt` that the parts measure: one rank of kdist's managed loop, step by step, as
`trainer.train` runs it but without its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from bench.gpu.parts import Order
from bench.ranks import free_ports, launch
from kdist_trainer.config import TrainConfig
from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.metrics.rank_metrics import StepStats
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.processes.liveness import NullHeartbeat
from kdist_trainer.training import trainer
from kdist_trainer.training.builder import RankRuntime, assemble
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.regroup import load_workload
from kdist_trainer.training.sync import StopFlag, flush_pending_losses, sync_ranks


class Shape(NamedTuple):
    """A model and its batch."""

    options: dict[str, int]
    batch: int


SHAPES = {
    "cuda": {
        # the size of GPT-2: a step that keeps a GPU busy
        "long": Shape({"layers": 12, "width": 768, "heads": 12, "block": 1024}, 32),
        # a step so short that the host's work shows
        "short": Shape({"layers": 2, "width": 256, "heads": 4, "block": 128}, 16),
    },
    "cpu": {
        "long": Shape({"layers": 2, "width": 64, "heads": 2, "block": 32, "corpusBytes": 2**16}, 8),
        "short": Shape(
            {"layers": 1, "width": 32, "heads": 2, "block": 16, "corpusBytes": 2**16}, 4
        ),
    },
}
ROOMY_BYTES = 38 * 2**30
"""Memory from which the long shape fits: its activations in fp32 take some 25 GiB."""
STEPS = 10**6
"""Of the job: more than any part runs."""


def launch_rank(module: str, order: Order, **more: Any) -> Any:
    """The result of one rank that runs `bench.gpu.<module>` and is told `order` and more."""
    told = {"device": order.device, "end": order.end, **order.settings, **more}
    extra = {"KDIST_BENCH": json.dumps(told), "MASTER_PORT": str(free_ports(1)[0])}
    return launch(f"bench.gpu.{module}", 1, extra)


def choose_shape(name: str, device: str) -> Shape:
    """The shape of that name for the device, as large as its memory allows."""
    shape = SHAPES[device][name]
    if device != "cuda" or name != "long":
        return shape
    return fit(shape, torch.cuda.get_device_properties(0).total_memory)


def fit(shape: Shape, memory: int) -> Shape:
    """The shape with a quarter of its batch, unless the device's memory in bytes is roomy."""
    return shape if memory >= ROOMY_BYTES else shape._replace(batch=shape.batch // 4)


def describe(shape: Shape, **train: Any) -> dict[str, Any]:
    """`spec.train` of the measured trainings."""
    return {
        "workload": "gpt",
        "options": shape.options,
        "steps": STEPS,
        "globalBatch": shape.batch,
        "evaluate": "never",
        "tensorboard": "off",
        **train,
    }


@contextlib.contextmanager
def open_training(train: Mapping[str, Any], device: str) -> Iterator[TrainContext]:
    """A training of one rank, ready for its first step. Raises `RuntimeError` if it is not on
    `device`.
    """
    document = {
        "name": "bench",
        "nodes": {"min": 1, "max": 1},
        "procsPerNode": 1,
        "train": dict(train),
    }
    config = TrainConfig.model_validate(document, by_alias=True, strict=False)
    assert config.train is not None
    torch.set_num_threads(1)
    heartbeat = collective_hooks.find_heartbeat()
    with World.from_environment(timeout_seconds=300) as world:
        if world.device.type != device:
            raise RuntimeError(f"the rank is on {world.device}, not on {device}")
        stats = StepStats(rank=0, generation=1)
        with Reporter(stats) as reporter:
            runtime = RankRuntime(
                world=world,
                stop_flag=StopFlag(),
                stats=stats,
                reporter=reporter,
                heartbeat=heartbeat or NullHeartbeat(),
            )
            ctx = assemble(config, config.train, load_workload(config.train, world.device), runtime)
            trainer.setup(ctx)
            yield ctx
            flush_pending_losses(ctx, check_weights=False)
            ctx.collective_timer.close()
            ctx.tensorboard.close()
            ctx.checkpointing.close()


def run_steps(ctx: TrainContext, count: int) -> None:
    """Run steps as the training loop does, with its exchange at the end of each interval."""
    for _ in range(count):
        trainer.train_step(ctx)
        if ctx.state.step >= ctx.next_sync_step:
            sync_ranks(ctx)
            ctx.next_sync_step = trainer.next_sync_step(ctx)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_on_device(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work` on its device: between two events on a GPU's stream."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def told() -> dict[str, Any]:
    """What `launch_rank` told this rank."""
    found: dict[str, Any] = json.loads(os.environ["KDIST_BENCH"])
    return found

"""What a checkpoint costs the training: the stall that every rank sees, how much slower the steps
after it are, and how long all ranks together compute for it.

    python -m bench.checkpoint [MEGABYTES]

kdist's store, in a folder and in a bucket of an S3 server on this machine, next to
`dcp.async_save` and a blocking `dcp.save` to a folder, on two ranks with the same DDP model and
AdamW. Both of torch's write files and a `.metadata`; kdist's also digests them, makes them durable,
checks its lock, and removes the checkpoint before.

The steps after a save are compared with as many right before it, so that a machine that becomes
slower or faster meanwhile counts for neither side. The processor time is that of a second save,
while no steps are taken: it hardly depends on what else the machine does.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.nn.parallel import DistributedDataParallel

from bench.bucket import BUCKET, launch_with_bucket
from bench.ranks import report
from bench.table import columns, seconds_with_spread, title
from kdist_trainer.checkpoint.checkpointer import CheckpointManager
from kdist_trainer.checkpoint.storage import StoragePath, open_location
from kdist_trainer.config import Checkpointing, Every, Keep
from kdist_trainer.distributed.world import World

RANKS, ROUNDS, AFTER = 2, 7, 10
WIDTH, BATCH, MEGABYTES = 1024, 32, 101
LARGE = 1000
"""Megabytes from which fewer rounds and steps take long enough."""
OURS, THEIRS = "kdist, async", "dcp.async_save"

Wait = Callable[[], object]
Contestant = Callable[[Any, int], Wait]
"""Begins a save of a state as of a step; what it returns waits until the save has ended."""


def main(megabytes: int) -> None:
    """Measure and print."""
    rounds, after = scale(megabytes)
    title(
        f"Checkpoint of {megabytes} MB (model and AdamW) on {RANKS} ranks, {rounds} "
        "of each, in turn"
    )
    result = launch_with_bucket("bench.checkpoint", RANKS, megabytes)
    plain, medians, lines = list[float](), {}, []
    for name, numbers in result.items():
        before, stall, slower, total, computed = zip(*numbers, strict=True)
        plain.extend(before)
        cost = [sum(both) for both in zip(stall, slower, strict=True)]
        shown = (stall, slower, cost, total, computed)
        medians[name] = [statistics.median(values) for values in shown]
        lines.append((name, *map(seconds_with_spread, shown)))
    slow = f"next {after} steps slower by"
    head = ("stall", slow, "stall + slower", "until it is safe", "processor time")
    columns(("median (least … most)", *head), lines)
    columns((f"{after} steps without a checkpoint: {seconds_with_spread(plain)}",), [])
    ratios = [
        f"{what} {ours / theirs:.2f}x"
        for what, ours, theirs in zip(head, medians[OURS], medians[THEIRS], strict=True)
    ]
    columns((f"{OURS} to {THEIRS}: {', '.join(ratios)}",), [])


def scale(megabytes: int) -> tuple[int, int]:
    """Rounds, and steps before and after each save, for a checkpoint of a size."""
    return (ROUNDS, AFTER) if megabytes < LARGE else (3, 3)


def rank() -> None:
    """One rank: the same training goes on while the contestants save it in turn."""
    torch.set_num_threads(1)
    folder, megabytes = Path(os.environ["KDIST_BENCH"]), int(os.environ["KDIST_BENCH_MEGABYTES"])
    rounds, after = scale(megabytes)
    with World.from_environment(timeout_seconds=120) as world:
        step, state = training(megabytes)
        contestants = {**stores(folder, world), **torchs(folder)}
        taken: dict[str, list[list[float]]] = {name: [] for name in contestants}
        names = list(contestants)
        for turn in range(rounds + 1):
            for name in names if turn % 2 else reversed(names):
                begin = contestants[name]
                numbers = measure(world, step, after, lambda: begin(state(), 2 * turn))  # noqa: B023 - called at once
                numbers.append(compute(world, partial(begin, state(), 2 * turn + 1)))
                if turn:  # the first round makes buffers and groups
                    taken[name].append(numbers)
                if world.rank == 0:
                    for path in folder.glob("dcp-*"):
                        shutil.rmtree(path)
        report(taken)


def training(megabytes: int) -> tuple[Callable[[], None], Callable[[], Any]]:
    """A training: the function that takes a step, and the one that gives model and optimizer as
    tensors by name, of about so many megabytes together.
    """
    torch.manual_seed(0)
    depth = round(megabytes * 1e6 / (3 * 4 * (WIDTH + 1) * WIDTH))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth))))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()

    def state() -> Any:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    return step, state


def measure(
    world: World, step: Callable[[], None], steps: int, begin: Callable[[], Wait]
) -> list[float]:
    """Seconds of some steps without a save, of the stall, by how much as many steps after it take
    longer, and from the save's begin to its end.
    """
    step()
    world.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    world.barrier()
    begun = time.perf_counter()
    wait = begin()
    returned = time.perf_counter()
    for _ in range(steps):
        step()
    stepped = time.perf_counter()
    wait()
    ended = time.perf_counter()
    world.barrier()
    plain = begun - started
    return [plain, returned - begun, stepped - returned - plain, ended - begun]


def compute(world: World, begin: Callable[[], Wait]) -> float:
    """Seconds that all threads of all ranks compute for a save."""
    world.barrier()
    before = time.process_time()
    begin()()
    shares: list[float] = world.all_gather_object(time.process_time() - before)
    return sum(shares)


def stores(folder: Path, world: World) -> dict[str, Contestant]:
    """Kdist's store in both modes, and in a bucket."""

    def contestant(mode: Any, root: StoragePath) -> Contestant:
        config = Checkpointing(every=Every(steps=10), mode=mode, keep=Keep(last=1))
        store = CheckpointManager(root, world=world, run_id="bench", config=config, job={})
        store.load({}, fingerprint="bench")

        def begin(state: Any, step: int) -> Wait:
            store.save(state, {"samples_seen": step}, step=step)
            return store.wait

        return begin

    return {
        OURS: contestant("async", folder / "kdist-async"),
        "kdist, async, bucket": contestant("async", open_location(f"s3://{BUCKET}/run")),
        "kdist, blocking": contestant("blocking", folder / "kdist-blocking"),
    }


def torchs(folder: Path) -> dict[str, Contestant]:
    """Torch's own, each time in a new folder; the asynchronous one with a group of its own, as its
    documentation asks.
    """
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # every rank is a member

    def in_background(state: Any, step: int) -> Wait:
        future = async_save(state, checkpoint_id=folder / f"dcp-async-{step}", process_group=group)
        return future.result  # type: ignore[union-attr]  # a Future unless another stager is asked for

    def blocking(state: Any, step: int) -> Wait:
        save(state, checkpoint_id=folder / f"dcp-{step}")
        return lambda: None

    return {THEIRS: in_background, "dcp.save": blocking}


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main(int(sys.argv[1]) if sys.argv[1:] else MEGABYTES)

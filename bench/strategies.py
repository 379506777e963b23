"""What spreading a model costs: the same training of `gpt` under each strategy, and in each
precision, side by side.

    python -m bench.strategies

Each row is a run of its own of the managed loop: the median over its steps after the first ones,
and the most memory of a rank (on a GPU what torch allocated there, else the process's own).
`data_parallel` is one process with all GPUs; the others have one rank for each GPU, or two on a
machine without. On a CPU the precisions show what autocast costs there, not what a GPU gains.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.ranks import free_ports, launch, report
from bench.table import columns, interleave, title
from kdist_trainer.config import TrainConfig

ROUNDS = 3
STEPS = 14
WARM = 4
ON_CPU = {"layers": 2, "width": 128, "block": 64, "corpusBytes": 262_144}
ON_GPU = {"layers": 12, "width": 768, "heads": 12, "block": 512}
STRATEGIES = ("ddp", "fsdp", "hsdp", "data_parallel")


def main() -> None:
    """Measure and print."""
    gpus = torch.cuda.device_count()
    ranks, device = gpus or 2, torch.cuda.get_device_name(0) if gpus else "CPU"
    title(
        f"gpt under each strategy, fp32, {device}, {ranks} ranks (data_parallel: one), "
        f"{ROUNDS} runs of each, in turn"
    )
    sizes = {name: 1 if name == "data_parallel" else ranks for name in STRATEGIES}
    measures = {name: partial(measure, name, "fp32", size) for name, size in sizes.items()}
    show(interleave(measures, rounds=ROUNDS), base="ddp")
    precisions = ("fp32", "tf32", "bf16", "fp16", "bf16-params") if gpus else ("fp32", "bf16")
    title(f"gpt in each precision, ddp, {device}, one rank, {ROUNDS} runs of each, in turn")
    show(
        interleave({name: partial(measure, "ddp", name, 1) for name in precisions}, rounds=ROUNDS),
        base="fp32",
    )


def show(found: dict[str, list[dict[str, float]]], *, base: str) -> None:
    """Print medians over the runs, and throughput as a ratio to that of `base`."""
    medians = {
        name: {
            key: statistics.median(run[key] for run in runs)
            for key in ("seconds", "tokens", "memory")
        }
        for name, runs in found.items()
    }
    lines = [
        (
            name,
            f"{one['seconds'] * 1e3:.1f} ms",
            f"{one['tokens']:,.0f}",
            f"{one['tokens'] / medians[base]['tokens']:.2f}x",
            f"{one['memory']:.0f} MiB",
        )
        for name, one in medians.items()
    ]
    columns(("", "a step", "tokens/s", f"to {base}", "memory of a rank"), lines)


def measure(strategy: str, precision: str, size: int) -> dict[str, float]:
    """One run: seconds of a step, tokens a second, and MiB of the rank that held most."""
    orders = {"strategy": strategy, "precision": precision}
    extra = {"KDIST_BENCH": json.dumps(orders), "MASTER_PORT": str(free_ports(1)[0])}
    result: dict[str, float] = launch("bench.strategies", size, extra)
    return result


def rank() -> None:
    """One rank of a run."""
    from kdist_trainer.distributed.world import World
    from kdist_trainer.metrics.rank_metrics import StepStats
    from kdist_trainer.metrics.transport import Reporter
    from kdist_trainer.training import trainer
    from kdist_trainer.training.builder import RankRuntime, assemble
    from kdist_trainer.training.regroup import load_workload
    from kdist_trainer.training.sync import StopFlag

    config = describe(json.loads(os.environ["KDIST_BENCH"]))
    assert config.train is not None
    torch.set_num_threads(1)
    marks: list[float] = []
    with World.from_environment(timeout_seconds=300) as world:
        stats = StepStats(rank=world.rank, generation=1)

        class Marks(Reporter):
            def send(self) -> None:
                marks.append(now(world.device))

        runtime = RankRuntime(world=world, stop_flag=StopFlag(), stats=stats, reporter=Marks(stats))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["KDIST_SCRATCH"] = folder
            trainer.train(
                assemble(config, config.train, load_workload(config.train, world.device), runtime)
            )
        every = world.all_gather_object(memory(world.device))
    seconds = statistics.median(
        after - before for before, after in zip(marks[WARM:], marks[WARM + 1 :], strict=False)
    )
    block = int(str(config.train.options["block"]))
    report(
        {
            "seconds": seconds,
            "tokens": config.train.global_batch * block / seconds,
            "memory": max(every),
        }
    )


def describe(orders: dict[str, Any]) -> TrainConfig:
    """The training that all runs have in common."""
    on_gpu = torch.cuda.is_available()
    train = {
        "workload": "gpt",
        "options": ON_GPU if on_gpu else ON_CPU,
        "steps": STEPS,
        "globalBatch": 64 if on_gpu else 16,
        "evaluate": "never",
        "collectiveTiming": "off",
        "tensorboard": "off",
        **orders,
    }
    nodes = {"min": 1, "max": 1}
    document = {
        "name": "bench",
        "nodes": nodes,
        "procsPerNode": int(os.environ["WORLD_SIZE"]),
        "train": train,
    }
    return TrainConfig.model_validate(document, by_alias=True, strict=False)


def now(device: torch.device) -> float:
    """The time at which the step is over on its device too."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: torch.device) -> float:
    """MiB at most: of a GPU what torch allocated, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()

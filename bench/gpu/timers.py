"""kdist's timer of all-reduces next to torch's profiler, over the same all-reduces.

On a GPU the timer brackets an all-reduce with two events, and the profiler knows the kernels. NCCL
launches none for a sum over one rank that is in place, as DDP's are; it does for a mean, which
multiplies. So both are measured: the steps of a training, and means of several sizes. On a CPU the
profiler's spans are gloo's own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from bench.gpu.parts import Order
from bench.gpu.training import (
    choose_shape,
    describe,
    launch_rank,
    open_training,
    run_steps,
    synchronize,
    told,
)
from bench.ranks import report
from kdist_trainer.instrumentation.step_timer import (
    CollectiveTimer,
    CudaAllReduceTimer,
    GlooAllReduceTimer,
    union_length,
)
from kdist_trainer.metrics.rank_metrics import Op, StepStats

STEPS = 10
WARM = {"cuda": 10, "cpu": 2}
MIB = {"cuda": (1, 64, 512), "cpu": (1, 4)}
READ_AFTER_STEPS = {"cuda": 2, "cpu": 0}
"""Steps after which the timer reads the events of a step."""
KERNELS = ("ncclDevKernel", "ncclKernel", "oneRankReduce")
"""In the names of NCCL's kernels; the last one is that of a group of one rank."""


def measure(order: Order) -> dict[str, Any]:
    """The figures of all comparisons."""
    figures: dict[str, Any] = launch_rank("timers", order)
    return figures


def rank() -> None:
    """The rank that is timed twice."""
    device = told()["device"]
    shape = choose_shape("long", device)
    rows = []
    with open_training(describe(shape, precision="bf16", collectiveTiming="off"), device) as ctx:
        run_steps(ctx, WARM[device])

        def timed_step(timer: CollectiveTimer) -> None:
            ctx.collective_timer = timer
            run_steps(ctx, 1)

        rows.append({"what": "DDP's sums in a step"} | compare(timed_step, ctx.world.device))
        for mib in MIB[device]:
            tensor = torch.zeros(mib * 2**18, device=ctx.world.device)
            one = partial(reduce_once, tensor)
            for _ in range(WARM[device]):
                reduce(tensor)
            rows.append({"what": f"one mean of {mib} MiB"} | compare(one, ctx.world.device))
    report({"shape": shape._asdict(), "steps": STEPS, "rows": rows})


def reduce_once(tensor: torch.Tensor, timer: CollectiveTimer) -> None:
    """A step of one all-reduce."""
    timer.start()
    reduce(tensor)
    timer.finish_step()


def reduce(tensor: torch.Tensor) -> None:
    """The mean over the ranks, which gloo has not: there it is the sum."""
    dist.all_reduce(tensor, dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM)


def compare(step: Callable[[CollectiveTimer], None], device: torch.device) -> dict[str, Any]:
    """What the timer and the profiler say about `STEPS` calls of `step`."""
    stats = StepStats()
    timer = (CudaAllReduceTimer if device.type == "cuda" else GlooAllReduceTimer)(stats)
    try:
        devices = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        synchronize(device)
        with profile(activities=[ProfilerActivity.CPU, *devices], acc_events=True) as profiler:
            for _ in range(STEPS):
                step(timer)
            synchronize(device)
        for _ in range(READ_AFTER_STEPS[device.type]):
            step(timer)
            synchronize(device)
    finally:
        timer.close()
    events = profiler.events() or []
    others = Counter(each.name[:60] for each in events if is_on_gpu(each)).most_common(8)
    found = [event for event in events if is_collective(event, device.type)]
    return {
        "timed": int(stats.collectives[Op.ALL_REDUCE]),
        "timer_seconds": stats.collective_seconds[Op.ALL_REDUCE],
        "profiled": len(found),
        "profiler_seconds": covered(found),
        "names": sorted({event.name[:60] for event in found}),
        # to see what the device did instead
        "on_device": [] if found else [name for name, _ in others],
    }


def is_collective(event: FunctionEvent, device: str) -> bool:
    """Whether an event of the profiler is a collective at work: a kernel of NCCL's, or a span of
    gloo's.
    """
    if device == "cuda":
        return is_on_gpu(event) and any(name in event.name for name in KERNELS)
    return str(event.name).startswith("gloo:")


def is_on_gpu(event: FunctionEvent) -> bool:
    """Whether the GPU did it, and not the host."""
    return bool(event.device_type.name == "CUDA")


def covered(events: Iterable[FunctionEvent]) -> float:
    """Seconds with at least one of the events under way."""
    return union_length((each.time_range.start, each.time_range.end) for each in events) / 1e6


if __name__ == "__main__" and sys.argv[1:] == ["rank"]:
    rank()

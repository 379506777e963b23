"""What measuring costs a step on this device: bench.cost's kinds in turn, in one training.

kdist notes and times no collectives where a rank is alone. Here they are noted and timed all the
same, as in a larger group: what it costs does not depend on the peers. Each block ends with a wait
for the device, so its time is that of host and device together.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.cost import KINDS, Switch
from bench.gpu.parts import Order
from bench.gpu.training import (
    choose_shape,
    describe,
    open_training,
    run_steps,
    synchronize,
    told,
)
from bench.ranks import launch_measured, report
from kdist_trainer.instrumentation import collective_hooks
from kdist_trainer.instrumentation.step_timer import CudaAllReduceTimer, GlooAllReduceTimer
from kdist_trainer.processes.liveness import Heartbeat
from kdist_trainer.training.context import TrainContext

GROUPS = {"cuda": {"short": 200, "long": 40}, "cpu": {"short": 5, "long": 5}}
"""Groups of blocks at most, one block of each kind in a group."""
LEAST_GROUPS = 3
BLOCK = 10
"""Steps of a block: as many as lie between two exchanges of the ranks."""
SETTLE = 2
"""Steps after a switch that are not measured."""
WARM = 20


def measure(order: Order) -> dict[str, Any]:
    """The figures of one shape."""
    orders: dict[str, Any] = {"ranks": 1, "rounds": 1, **order.settings}
    orders |= {"device": order.device, "end": order.end}
    figures: dict[str, Any] = launch_measured("bench.gpu.measuring", orders, 1)
    return figures


def rank() -> None:
    """The rank that trains, and whose measuring is switched."""
    order = told()
    os.environ["MASTER_PORT"] = str(order["ports"][0])
    os.environ["KDIST_METRICS_SOCKET"] = f"{order['folder']}/metrics.sock"
    os.environ["KDIST_SCRATCH"] = order["folder"]
    device = order["device"]
    shape = choose_shape(order["shape"], device)
    groups: list[list[float]] = []
    with open_training(describe(shape, precision="bf16"), device) as ctx:
        switch = Switch(measure_as_in_a_group(ctx))
        run_steps(ctx, WARM)
        draw, most = random.Random(0), GROUPS[device][order["shape"]]
        while len(groups) < most and (
            len(groups) < LEAST_GROUPS or time.monotonic() < order["end"]
        ):
            seconds = [0.0 for _ in KINDS]
            for kind in draw.sample(range(len(KINDS)), len(KINDS)):
                switch.turn(kind)
                seconds[kind] = time_block(ctx)
            groups.append(seconds)
        switch.turn(len(KINDS) - 1)  # all of it, which `open_training` closes
        collective_hooks.remove_recorder()
    report({"shape": shape._asdict(), **compare(groups)})


def measure_as_in_a_group(ctx: TrainContext) -> TrainContext:
    """Note and time the collectives of a rank that is alone."""
    heartbeat = ctx.heartbeat
    assert isinstance(heartbeat, Heartbeat)
    collective_hooks.install_recorder(heartbeat)
    timer = CudaAllReduceTimer if ctx.world.device.type == "cuda" else GlooAllReduceTimer
    ctx.collective_timer = timer(ctx.stats, heartbeat)
    return ctx


def time_block(ctx: TrainContext) -> float:
    """Mean seconds of a block's steps, until the device is done with them."""
    run_steps(ctx, SETTLE)
    synchronize(ctx.world.device)
    began = time.perf_counter()
    run_steps(ctx, BLOCK)
    synchronize(ctx.world.device)
    return (time.perf_counter() - began) / BLOCK


def compare(groups: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Seconds of a step of each kind, and by how much it is longer than with nothing measured."""
    rows = []
    for kind, name in enumerate(KINDS):
        more, error = difference([group[kind] - group[0] for group in groups])
        rows.append(
            {
                "kind": name,
                "step_seconds": statistics.median(group[kind] for group in groups),
                "more_seconds": more,
                "error_seconds": error,
            }
        )
    return {"groups": len(groups), "kinds": rows}


def difference(apart: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error, without the tenth at each end: what the machine did to single
    blocks.
    """
    cut = len(apart) // 10
    middle = sorted(apart)[cut : len(apart) - cut]
    return statistics.fmean(middle), statistics.stdev(middle) / math.sqrt(len(middle))


if __name__ == "__main__" and sys.argv[1:] == ["rank"]:
    rank()

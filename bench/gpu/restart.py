"""How long a training on this device stalls when its rank is killed: from kill -9 to the next step
that is finished on the device, under `kdist run`.

One rank has no peer that keeps the state, so each recovery starts a process, opens the device and
NCCL, and restores the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu.launched import launch_job
from bench.gpu.parts import Order
from bench.gpu.training import SHAPES, describe
from bench.marks import read
from bench.recovery import PATIENCE, follow
from bench.script import mark
from kdist_trainer.training import trainer
from kdist_trainer.training.context import TrainContext
from kdist_trainer.workload import WorkloadContext
from kdist_trainer.workloads.gpt import Gpt

KILLS = {"cuda": 5, "cpu": 2}
STEPS_BEFORE = 30
DEVICE = "KDIST_BENCH_DEVICE"
EVERY = 20
"""Steps between two checkpoints."""
STEP_SECONDS = 0.02
"""Added to a step, so that the machine is not busy with writing marks."""


class Marked(Gpt):
    """`gpt`, in a process that notes when a step of the training is finished on its device. Warm-up
    passes, which ask for a loss too, are not noted.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        if context.device.type != os.environ[DEVICE]:
            raise RuntimeError(f"the rank is on {context.device}, not on {os.environ[DEVICE]}")
        train_step = trainer.train_step

        def marked(ctx: TrainContext) -> bool:
            applied = train_step(ctx)
            if ctx.world.device.type == "cuda":
                torch.cuda.synchronize()
            mark(ctx.state.step)
            time.sleep(STEP_SECONDS)
            return applied

        trainer.train_step = marked


def measure(order: Order) -> dict[str, Any]:
    """Seconds of each recovery."""
    shape = SHAPES[order.device]["short"]
    train = describe(shape, precision="bf16", checkpoint={"every": {"steps": EVERY}})
    train["workload"] = "bench.gpu.restart:Marked"
    seconds: list[float] = []
    resumed: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        marks = Path(name, "marks")
        with launch_job(Path(name), train, {DEVICE: order.device}) as job:
            slowest = 0.0
            while len(seconds) < KILLS[order.device] and time.monotonic() + 2 * slowest < order.end:
                began = time.monotonic()
                try:
                    taken, step = kill_once(marks, job.process)
                except RuntimeError as error:
                    before = ", ".join(f"{each:.2f} s" for each in seconds) or "none"
                    raise RuntimeError(f"{error} (recoveries before: {before})") from error
                seconds.append(taken)
                resumed.append(step)
                slowest = max(slowest, time.monotonic() - began)
    return {
        "shape": shape._asdict(),
        "every": EVERY,
        "seconds": seconds,
        "resumed_at": resumed,
        "median_seconds": statistics.median(seconds),
    }


def kill_once(marks: Path, process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Seconds from the kill of the rank to the next finished step, and that step.

    Raises:
        RuntimeError: If the training does not get there.
    """
    pids = {(each.pid, each.generation) for each in read(marks)}
    newest = {(read(marks)[-1].pid, read(marks)[-1].generation)} if pids else set()
    if follow(marks, process, after=0.0, known=pids - newest, steps=STEPS_BEFORE) is None:
        raise RuntimeError(f"the training has no {STEPS_BEFORE} steps within {PATIENCE:.0f} s")
    known = {(each.pid, each.generation) for each in read(marks)}
    victim = read(marks)[-1].pid
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    first = follow(marks, process, after=killed, known=known)
    if first is None:
        raise RuntimeError(f"no step within {PATIENCE:.0f} s of the kill")
    return first.time - killed, first.step

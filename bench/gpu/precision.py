"""Tokens a second, memory and model FLOPs utilization of `gpt` in one precision: `train.precision`
of the job, one rank.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import torch

from bench.gpu.parts import Order
from bench.gpu.training import (
    choose_shape,
    describe,
    launch_rank,
    open_training,
    run_steps,
    synchronize,
    time_on_device,
    told,
)
from bench.ranks import report
from bench.strategies import memory
from bench.table import spread
from kdist_trainer.instrumentation.device_stats import peak_flops
from kdist_trainer.training.context import TrainContext
from kdist_trainer.workloads.gpt import BYTES, GptOptions

WARM = {"cuda": 20, "cpu": 3}
"""Steps before the first measured one. In fp16 the first ones only lower the loss scale."""
BLOCKS = {"cuda": 8, "cpu": 3}
STEPS = {"cuda": 10, "cpu": 3}
"""Steps of a block."""
LEAST_BLOCKS = 3


def measure(order: Order) -> dict[str, Any]:
    """The figures of one precision."""
    figures: dict[str, Any] = launch_rank("precision", order)
    return figures


def rank() -> None:
    """The rank that trains."""
    order = told()
    device, precision = order["device"], order["precision"]
    shape = choose_shape("long", device)
    train = describe(shape, precision=precision, collectiveTiming="off")
    with open_training(train, device) as ctx:
        run_steps(ctx, WARM[device])
        synchronize(ctx.world.device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tokens = STEPS[device] * shape.batch * shape.options["block"]
        rates: list[float] = []
        while len(rates) < BLOCKS[device]:
            if len(rates) >= LEAST_BLOCKS and time.monotonic() > order["end"]:
                break
            work = partial(run_steps, ctx, STEPS[device])
            rates.append(tokens / time_on_device(work, ctx.world.device))
        figures = summarize(ctx, rates, precision)
    report({"shape": shape._asdict(), "device": device, **figures})


def summarize(ctx: TrainContext, rates: list[float], precision: str) -> dict[str, Any]:
    """The figures of a rank that has trained at these rates, in tokens a second."""
    name = torch.cuda.get_device_name() if ctx.world.device.type == "cuda" else "CPU"
    options = GptOptions.model_validate(ctx.settings.options, by_alias=True, strict=False)
    rate, needed = statistics.median(rates), flops_per_token(options)
    ctx.device_stats.sample()
    low, high = spread(rates)
    return {
        "precision": precision,
        "tokens_per_second": rate,
        "low": low,
        "high": high,
        "blocks": len(rates),
        "step_seconds": ctx.settings.global_batch * options.block / rate,
        "memory_mib": memory(ctx.world.device),
        "flops_per_token": needed,
        "counted_flops_per_token": ctx.stats.model_flops / (ctx.stats.samples * options.block),
        "flops_per_second": rate * needed,
        "mfu": utilization(rate * needed, name, precision),
        "matmul": torch.get_float32_matmul_precision(),
    }


def utilization(flops_per_second: float, device: str, precision: str) -> float | None:
    """Share of the peak of `device`, a device's name; None if kdist knows no peak of it in this
    precision.
    """
    peak = peak_flops(device, precision)
    return None if peak is None else flops_per_second / peak


def flops_per_token(options: GptOptions) -> float:
    """FLOPs that a token needs in the forward and the backward pass: 6N + 12LHQT, as in appendix B
    of PaLM (A. Chowdhery et al., 2022), https://arxiv.org/abs/2204.02311.

    N are the weights of the matrix products: the tables of the embeddings are looked up, not
    multiplied. L layers, H heads of Q channels, T tokens of context; attention is counted as if it
    were not causal. Utilization is tokens a second times this, over the device's peak.
    """
    width, layers = options.width, options.layers
    weights = 12 * layers * width**2 + BYTES * width
    return 6.0 * weights + 12.0 * layers * width * options.block


if __name__ == "__main__" and sys.argv[1:] == ["rank"]:
    rank()

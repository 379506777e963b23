"""Measure the model on the test split, each sample once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from kdist_trainer import log
from kdist_trainer.data.loader import fetcher
from kdist_trainer.data.step_plan import share_of
from kdist_trainer.errors import ConfigError
from kdist_trainer.liveness import Phase
from kdist_trainer.metrics.step_stats import Wall
from kdist_trainer.rng import EVALUATE, derive, generators
from kdist_trainer.stream import Stream
from kdist_trainer.training.context import TrainContext


def measure(run: TrainContext) -> dict[str, float]:
    """Evaluate, with the moving average of the weights if there is one, and log the metrics.
    Collective.
    """
    run.beat(Phase.EVALUATE, run.state.step)
    run.flush()
    run.buffers.agree_on_late()
    with run.averages.in_place() if run.averages is not None else nullcontext():
        metrics = evaluate(run)
    run.stats.add_wall(Wall.EVALUATION, run.laps.skip())
    if run.world.is_leader:
        log.event("evaluated", step=run.state.step, metrics=metrics)
    run.curves.add_metrics(run.state.step, metrics)
    run.saves.diary.add_event("evaluated", step=run.state.step, metrics=metrics)
    return metrics


def gets_no_better(run: TrainContext) -> bool:
    """Evaluate during training; returns whether to stop early. Collective. Raises `ConfigError`."""
    run.state.evaluated = run.state.step
    metrics = measure(run)
    if run.patience is None or not run.patience.observe(metrics):
        return False
    if run.world.is_leader:
        log.event("early-stop", step=run.state.step, metrics=metrics)
    run.saves.diary.add_event("early_stop", step=run.state.step)
    return True


def evaluate(run: TrainContext) -> dict[str, float]:
    """Metrics of the test split, the same on every rank; empty if the workload has none.
    Collective.
    """
    samples = run.workload.dataset("test")
    if isinstance(samples, Stream):
        raise ConfigError(
            f"{type(run.workload).__name__}.dataset('test') is a stream; what is "
            "evaluated must have a length"
        )
    if samples is None or len(samples) == 0:
        return {}
    world = run.world
    own = share_of(len(samples), world.data_size, world.data_rank)
    rounds = len(share_of(len(samples), world.data_size, 0))  # the first share is the longest
    fetch = fetcher(run.workload, samples)
    sums: dict[str, tuple[float, int]] = {}
    set_generators = generators(world.device)
    with in_eval_mode(run.module), torch.no_grad():
        for offset in range(0, rounds if run.strategy.sharded else len(own), run.evaluation_batch):
            run.beat(Phase.EVALUATE, run.state.step)
            # A rank whose share is used up still joins the forward passes of a sharded model, with
            # a sample that counts nothing.
            start = own.start + offset
            indices = (
                torch.arange(start, min(start + run.evaluation_batch, own.stop))
                if start < own.stop
                else torch.tensor([0])
            )
            seed = derive(run.state.seed, EVALUATE, start)
            batch = run.workload.to_device(fetch(indices, seed))
            set_generators(seed)
            with run.precision.autocast():
                measured = run.workload.evaluate(run.module, batch)
            for name, (total, count) in measured.items() if start < own.stop else ():
                before = sums.get(name, (0.0, 0))
                sums[name] = (before[0] + float(total), before[1] + count)
    run.strategy.let_go()
    return run.workload.summarize(
        _means(world.all_gather_object(sums if run.strategy.counts else {}))
    )


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluate within the `with` block; afterwards each submodule is in its former mode, since
    users may have frozen some.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _means(parts: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """Sums and counts of all ranks, added in rank order, as means."""
    names = dict.fromkeys(name for part in parts for name in part)
    totals = {name: [part[name] for part in parts if name in part] for name in names}
    return {
        name: sum(s for s, _ in found) / max(1, sum(n for _, n in found))
        for name, found in totals.items()
    }

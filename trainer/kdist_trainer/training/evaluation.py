"""Evaluates the model on the test split, each sample once whatever the number of ranks, and stops a
training early whose evaluations no longer improve.

A request to stop does not wait for the end of an evaluation, which may take longer than the grace
period: all ranks leave it between two batches, and the run does it again when it continues.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from kdist_trainer import log
from kdist_trainer.config import Best, EarlyStop
from kdist_trainer.data.loader import fetcher
from kdist_trainer.data.step_plan import split_range
from kdist_trainer.errors import ConfigError
from kdist_trainer.metrics.rank_metrics import WallCategory
from kdist_trainer.numerics.rng import EVALUATE, Generators, derive
from kdist_trainer.processes.liveness import Phase
from kdist_trainer.state import digest_of, digests_of, eval_mode, read_module
from kdist_trainer.stream import Stream
from kdist_trainer.training.sync import choose_sync_interval

if TYPE_CHECKING:
    from kdist_trainer.training.context import TrainContext


_MOST_BATCHES: Final = 1000
"""Batches between two checks whether a rank is asked to stop."""


class EvaluationLeftError(Exception):
    """An evaluation was left before its end, since a rank was asked to stop. The model is as it was
    before.
    """


class MetricMissingError(ConfigError):
    """An evaluation has no metric of the name that the job asks for; on all ranks."""


def next_evaluation_step(ctx: TrainContext, step: int) -> int | None:
    """The next step after `step` at which the model is evaluated during training; None if the run
    ends before.
    """
    every = ctx.settings.evaluate_every_steps
    following = None if every is None else (step // every + 1) * every
    return following if following is not None and following < ctx.target else None


def is_evaluation_due(ctx: TrainContext) -> bool:
    """Whether the model is evaluated after this step during training."""
    step = ctx.state.step
    return next_evaluation_step(ctx, step - 1) == step


def measure(ctx: TrainContext) -> dict[str, float]:
    """Evaluate the moving average of the weights, or the weights if there is none; log and return
    the metrics. Collective. Raises `EvaluationLeftError` on all ranks if one was asked to stop.
    """
    ctx.heartbeat.beat(Phase.EVALUATE, ctx.state.step)
    ctx.reporter.flush()
    ctx.buffers.synchronize_late()
    with unchanged_if_left(ctx), ctx.ema.swapped_in(), ctx.buffers.preserved():
        metrics = evaluate(ctx)
    ctx.stats.add_wall(WallCategory.EVALUATION, ctx.step_timer.exclude())
    if metrics is None:
        if ctx.world.is_rank_zero:
            log.event("evaluation-left", step=ctx.state.step)
        raise EvaluationLeftError
    ctx.stats.evaluation_loss = metrics.get("loss", ctx.stats.evaluation_loss)
    if ctx.world.is_rank_zero:
        log.event("evaluated", step=ctx.state.step, metrics=metrics)
    ctx.tensorboard.add_metrics(ctx.state.step, metrics)
    ctx.step_log.add_event("evaluated", step=ctx.state.step, metrics=metrics)
    return metrics


@contextmanager
def unchanged_if_left(ctx: TrainContext) -> Iterator[None]:
    """If an error ends the `with` block, keep this rank's state only if the model is unchanged: a
    workload may evaluate other weights, and the error may keep it from restoring its own.
    """
    # on a device it is not kept in any case, and its digest takes as long as a copy
    is_kept = ctx.world.device.type == "cpu" and ctx.world.size > 1
    before = digests_of(read_module(ctx.module)) if is_kept else None
    try:
        yield
    except BaseException:
        if before is not None and digests_of(read_module(ctx.module)) != before:
            ctx.is_consistent = False
            log.warn(
                "recovery-restarts",
                message="the evaluation was left with other weights than it began with: the ranks "
                "restart from the newest checkpoint",
            )
        raise


def should_stop_early(ctx: TrainContext) -> bool:
    """Evaluate during training; returns whether to stop early. Collective.

    Raises:
        ConfigError: If the test split is a stream.
        MetricMissingError: If the workload does not report the metric that early stopping watches
            or the best checkpoint is chosen by.
    """
    metrics = measure(ctx)
    if ctx.early_stopping.record_best(metrics):
        ctx.checkpointing.best_at = ctx.state.step
    should_stop = ctx.early_stopping.observe(metrics)
    # not before: a rank that leaves its group within the evaluation has it still to do
    ctx.state.evaluated = ctx.state.step
    if not should_stop:
        return False
    if ctx.world.is_rank_zero:
        log.event("early-stop", step=ctx.state.step, metrics=metrics)
    ctx.step_log.add_event("early_stop", step=ctx.state.step)
    return True


def evaluate(ctx: TrainContext) -> dict[str, float] | None:
    """Compute the metrics of the test split, by name, the same on every rank: empty if the workload
    has none, None if it was left, since a rank was asked to stop. Collective. Raises `ConfigError`
    if the test split is a stream.
    """
    samples = ctx.workload.dataset("test")
    if isinstance(samples, Stream):
        raise ConfigError(
            f"{type(ctx.workload).__name__}.dataset('test') is a stream; what is "
            "evaluated must have a length"
        )
    if samples is None or len(samples) == 0:
        return {}
    world = ctx.world
    own = split_range(len(samples), world.data_size, world.data_rank)
    longest = len(split_range(len(samples), world.data_size, 0))
    sums: dict[str, tuple[float, int]] = {}
    generators = Generators.all(world.device)
    weights, began, next_poll = digest_of(dict(ctx.module.named_parameters())), time.monotonic(), 1
    fetch = fetcher(ctx.workload, samples)
    with eval_mode(ctx.module), torch.no_grad():
        for done, offset in enumerate(range(0, longest, ctx.evaluation_batch)):
            ctx.heartbeat.beat(Phase.EVALUATE, ctx.state.step)
            ctx.stop_flag.raise_if_leaving()
            if done >= next_poll:
                seconds = (time.monotonic() - began) / done
                peers = world.all_gather_object((ctx.stop_flag.requested, seconds))
                slowest = max(each for _, each in peers)
                next_poll = done + choose_sync_interval(slowest, _MOST_BATCHES)
                # A workload may have put other weights into the model until the end of its
                # evaluation: then it is not left.
                if any(stops for stops, _ in peers) and all(
                    world.all_gather_object(
                        digest_of(dict(ctx.module.named_parameters())) == weights
                    )
                ):
                    ctx.strategy.reshard()
                    return None
            # A rank whose samples are used up still joins the forward passes of a sharded model,
            # with a sample that is not counted.
            start = own.start + offset
            counted = start < own.stop
            if not (counted or ctx.strategy.sharded):
                continue
            last = min(start + ctx.evaluation_batch, own.stop)
            indices = torch.arange(start, last) if counted else torch.tensor([0])
            seed = derive(ctx.state.seed, EVALUATE, start)
            batch = ctx.workload.to_device(fetch(indices, seed))
            generators.seed(seed)
            with ctx.precision.autocast():
                measured = ctx.workload.evaluate(ctx.module, batch)
            for name, (total, count) in (measured if counted else {}).items():
                before = sums.get(name, (0.0, 0))
                sums[name] = (before[0] + float(total), before[1] + count)
    ctx.strategy.reshard()
    every = world.all_gather_object(sums if ctx.strategy.is_counted else {})
    means = {}
    for name in dict.fromkeys(name for sums in every for name in sums):  # added in rank order
        pairs = [sums[name] for sums in every if name in sums]
        terms = sum(count for _, count in pairs)
        means[name] = sum(total for total, _ in pairs) / max(1, terms)
    # NumPy's and torch's numbers would be in no event, and choose no checkpoint
    return {name: float(value) for name, value in ctx.workload.summarize(means).items()}


def check_metric(metrics: Mapping[str, float], name: str, *, of: str) -> None:
    """Raise `MetricMissingError` if an evaluation has no metric that the section names."""
    if name not in metrics:
        raise MetricMissingError(
            f"train.{of}.metric: the evaluation has no `{name}`; it has "
            f"{', '.join(sorted(metrics)) or 'none'}"
        )


class EarlyStopping:
    """Counts evaluations without improvement, and knows the best one for `keep.best`. The metrics
    are equal on all ranks, so all ranks decide the same. Without settings, the training never stops
    early.
    """

    def __init__(self, settings: EarlyStop | None, keep: Best | None = None) -> None:
        self._settings, self._keep = settings, keep
        self._kept: float | None = None
        self._best: float | None = None
        self._without_improvement = 0

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Record the metrics of an evaluation; returns whether the training should stop. Raises
        `MetricMissingError` if the workload does not report the metric.
        """
        if self._settings is None:
            return False
        name = self._settings.metric
        check_metric(metrics, name, of="earlyStop")
        value = metrics[name] if self._settings.goal == "min" else -metrics[name]
        if math.isfinite(value) and (
            self._best is None or value < self._best - self._settings.min_delta
        ):
            self._best = value
            self._without_improvement = 0
        else:
            self._without_improvement += 1
        return self._without_improvement >= self._settings.patience

    def record_best(self, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation; returns whether it is better than all before by `keep.best`. Raises
        `MetricMissingError`.
        """
        if self._keep is None:
            return False
        check_metric(metrics, self._keep.metric, of="checkpoint.keep.best")
        value = metrics[self._keep.metric] * (1 if self._keep.goal == "min" else -1)
        if not math.isfinite(value) or (self._kept is not None and value >= self._kept):
            return False
        self._kept = value
        return True

    def state_dict(self) -> dict[str, Any]:
        kept = {} if self._keep is None else {"keep": self._keep.model_dump(), "kept": self._kept}
        return {"best": self._best, "waited": self._without_improvement, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]
        self._without_improvement = state["waited"]
        if self._keep is not None and state.get("keep") == self._keep.model_dump():
            self._kept = state["kept"]

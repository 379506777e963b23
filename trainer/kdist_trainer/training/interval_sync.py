"""What the training loop does at the end of each sync interval.

It posts this rank's losses and flags, collects those of the previous interval, and passes them to
the ledger, the metrics and the log. Losses, gradients and weights that are not finite are handled
here as the job's `onNonfinite` asks.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from kdist_trainer import log
from kdist_trainer.errors import NonFiniteError
from kdist_trainer.training import replicas
from kdist_trainer.training.sync import (
    IntervalResult,
    StepRecord,
    SyncPayload,
    choose_sync_interval,
)

if TYPE_CHECKING:
    from kdist_trainer.training.context import TrainContext

PROGRESS_SECONDS = 1.0
"""Least time between two `progress` events."""


def sync_ranks(ctx: TrainContext) -> IntervalResult:
    """Post this interval's losses and flags, and collect those of all ranks for the previous
    interval. Collective.

    Raises:
        NonFiniteError: If a loss is not finite and the job asks to stop then.
    """
    if ctx.state.step == ctx.first_step:
        log_first_step(ctx)
    result = IntervalResult()
    if ctx.sync_exchange.pending:
        result = ctx.sync_exchange.collect()
        record_interval(ctx, result)
    records, losses = take_records(ctx)
    ctx.sync_exchange.post(
        SyncPayload(
            records=records,
            losses=losses,
            grad_norm=ctx.grad_norm,
            stop=ctx.stop_flag.requested,
            save=ctx.checkpointing.is_due_by_clock(answered_after_steps=ctx.sync_interval),
            profile=ctx.profiler.is_requested(),
            digest=replicas.take_digest(ctx) if ctx.state.step == ctx.first_step else None,
            save_cost=ctx.checkpointing.clock.interval.cost or 0.0,
            carried=ctx.checkpointing.carrying.news,
        )
    )
    ctx.checkpointing.poll()
    steps = [
        ctx.state.step + ctx.sync_interval,
        ctx.target,
        ctx.checkpointing.next_due(ctx.state.step),
        ctx.next_evaluation_step(ctx.state.step),
    ]
    ctx.next_sync_step = min(step for step in steps if step is not None)
    return result


def take_records(ctx: TrainContext) -> tuple[tuple[StepRecord, ...], tuple[Tensor, ...]]:
    """Take this rank's steps since the last exchange, and their losses. Their time is added to the
    clock of the saves here: a call in each step would cost a microsecond.
    """
    records, losses = tuple(ctx.step_records), tuple(ctx.losses)
    ctx.step_records.clear()
    ctx.losses.clear()
    ctx.checkpointing.clock.add_steps(len(records), sum([record.seconds for record in records]))
    return records, losses


def log_first_step(ctx: TrainContext) -> None:
    """Log the first step of this worker group, which ends the recovery time."""
    if ctx.world.is_rank_zero:
        log.event("first-step", step=ctx.state.step)
        seconds = round(ctx.checkpointing.clock.trained, 3)
        ctx.step_log.add_event("first_step", step=ctx.state.step, seconds=seconds)


def record_interval(ctx: TrainContext, result: IntervalResult) -> None:
    """Record an interval's losses in ledger, metrics and log.

    Raises:
        NonFiniteError: If a loss is not finite and the job asks to stop then.
        ReplicasDifferError: If ranks hold other values than they should.
    """
    # kept: where an evaluation or a save collects the exchange, the loop does not see its result
    ctx.stop_agreed |= result.stop
    ctx.profile_agreed |= result.profile
    replicas.check_replicas(ctx, result)
    ctx.checkpointing.take_news(result.carried)
    if not result.records:
        return
    ctx.step_log.add_steps(result.records, result.losses)
    ctx.sync_interval = choose_sync_interval(result.step_seconds, ctx.settings.sync_every_steps)
    ctx.checkpointing.clock.interval.take_costs(result.save_cost)
    ctx.stats.loss = result.losses[-1]
    ctx.stats.grad_norm = result.grad_norm
    if (learning_rate := result.records[-1].learning_rate) is not None:
        ctx.stats.learning_rate = float(learning_rate)
    ctx.device_stats.sample()
    ctx.stats.tokens = ctx.stats.samples * ctx.workload.tokens_per_sample
    for record, loss in zip(result.records, result.losses, strict=True):
        ctx.tensorboard.add_step(
            record.step, samples=record.last - record.first + 1, seconds=record.seconds, loss=loss
        )
        if not math.isfinite(loss):
            ctx.stats.add_nonfinite("loss")
            on_nonfinite(ctx, f"the loss of step {record.step} is {loss}")
    if ctx.world.is_rank_zero and time.monotonic() - ctx.progress_logged_at >= PROGRESS_SECONDS:
        log_progress(ctx, result)


def log_progress(ctx: TrainContext, result: IntervalResult) -> None:
    """Log the progress of the training."""
    ctx.progress_logged_at = time.monotonic()
    seconds = sum(record.seconds for record in result.records)
    samples = result.records[-1].last - result.records[0].first + 1
    log.event(
        "progress",
        step=result.records[-1].step,
        target=ctx.target,
        loss=result.losses[-1],
        learning_rate=ctx.stats.learning_rate,
        samples_per_second=round(samples / seconds, 1) if seconds else None,
    )


def on_nonfinite(ctx: TrainContext, why: str) -> None:
    """End the training at a number that is not finite, if the job asks for it.

    Raises:
        NonFiniteError: If `onNonfinite` is `stop`.
    """
    if ctx.settings.on_nonfinite == "stop":
        raise_nonfinite(ctx, why)


def raise_nonfinite(ctx: TrainContext, why: str) -> NoReturn:
    """End the training.

    Raises:
        NonFiniteError: Always.
    """
    newest = max(0, ctx.checkpointing.committed_step)
    raise NonFiniteError(f"{why}; the newest checkpoint is of step {newest}")


def record_refused_update(ctx: TrainContext, why: str) -> bool:
    """Record that the guard refused the update of the current step; returns whether the training
    must be rolled back. Collective.
    """
    step = ctx.state.step + 1
    ctx.stats.add_nonfinite("grad")
    ctx.checkpointing.wait_for_pending()  # so that all ranks see the same newest checkpoint
    if ctx.guard.rolls_back(step) and ctx.checkpointing.committed_step >= 0:
        return True
    first = ctx.state.samples_seen
    last = first + ctx.loader.step_size(first) - 1
    if ctx.world.is_rank_zero:
        message = (
            f"the update of step {step} (samples {first} to {last} of the stream) is skipped: {why}"
        )
        log.warn("step-skipped", step=step, first=first, last=last, message=message)
    ctx.step_log.add_event("skipped", step=step, first=first, last=last, why=why)
    return False


def flush_pending_losses(ctx: TrainContext, *, check_weights: bool = True) -> None:
    """Collect every loss up to this step, and check that the state is consistent. Collective.

    Args:
        ctx: The training.
        check_weights: Whether to check that all weights are finite.

    Raises:
        NonFiniteError: If a loss or a weight is not finite and the job asks to stop then.
        ReplicasDifferError: If ranks hold other values than they should.
    """
    digest = replicas.take_digest(ctx)
    if ctx.step_records or digest is not None:
        records, losses = take_records(ctx)
        ctx.sync_exchange.post(SyncPayload(records, losses, ctx.grad_norm, digest=digest))
    while ctx.sync_exchange.pending:
        record_interval(ctx, ctx.sync_exchange.collect())
    ctx.reporter.flush()
    ctx.buffers.synchronize_late()
    if check_weights and not ctx.checkpointing.weights_are_finite():
        on_nonfinite(ctx, f"a weight is NaN or infinite after step {ctx.state.step}")

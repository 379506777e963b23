"""What the training loop does at the end of each sync interval.

It posts this rank's losses and flags, collects those of the previous interval, and passes them to
the ledger, the metrics and the log. Losses, gradients and weights that are not finite are handled
here as the job's `onNonfinite` asks.
"""

from __future__ import annotations

import math
import time
from typing import NoReturn

from torch import Tensor

from kdist_trainer import log
from kdist_trainer.errors import NonFiniteError
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.profiler import asked
from kdist_trainer.training.sync import Interval, SyncPayload, interval_of

PROGRESS_SECONDS = 1.0
"""Least time between two log lines of progress."""


def sync_ranks(run: TrainContext) -> Interval:
    """Post this interval's losses and flags, and collect those of all ranks for the previous
    interval.
    """
    if run.state.step == run.first_step:
        log_first_step(run)
    said = record_interval(run, run.exchange.collect()) if run.exchange.pending else Interval()
    flags = (run.flag.requested, run.saves.due_by_clock(), asked(run))
    run.exchange.post(SyncPayload(tuple(run.records), tuple(run.losses), run.norm, *flags))
    run.records.clear()
    run.losses.clear()
    run.saves.poll()
    steps = [
        run.state.step + run.interval,
        run.target,
        run.saves.due_after(run.state.step),
        run.evaluates_after(run.state.step),
    ]
    run.boundary = min(step for step in steps if step is not None)
    return said


def log_first_step(run: TrainContext) -> None:
    """Log the first step of this generation, which ends the recovery time."""
    if run.world.is_leader:
        log.event("first-step", step=run.state.step)
        run.saves.diary.add_event("first_step", step=run.state.step)


def record_interval(run: TrainContext, said: Interval) -> Interval:
    """Record an interval's losses in ledger, metrics and log. Raises `NonFiniteError`."""
    run.saves.diary.add_steps(said.records, said.losses)
    run.interval = interval_of(said.step_seconds, run.settings.sync_every_steps)
    run.stats.loss, run.stats.grad_norm = said.losses[-1], said.norm
    run.stats.learning_rate = run.optimizer.param_groups[0]["lr"]
    run.resources.look()
    run.stats.tokens = run.stats.samples * run.workload.tokens_per_sample
    for record, loss in zip(said.records, said.losses, strict=True):
        run.curves.add_step(
            record.step, samples=record.last - record.first + 1, seconds=record.seconds, loss=loss
        )
        if not math.isfinite(loss):
            run.stats.add_nonfinite("loss")
            on_nonfinite(run, f"the loss of step {record.step} is {loss}")
    if run.world.is_leader and time.monotonic() - run.spoken_at >= PROGRESS_SECONDS:
        log_progress(run, said)
    return said


def log_progress(run: TrainContext, said: Interval) -> None:
    """Log the progress of the training."""
    run.spoken_at = time.monotonic()
    seconds = sum(record.seconds for record in said.records)
    samples = said.records[-1].last - said.records[0].first + 1
    log.event(
        "progress",
        step=said.records[-1].step,
        target=run.target,
        loss=said.losses[-1],
        learning_rate=run.stats.learning_rate,
        samples_per_second=round(samples / seconds, 1) if seconds else None,
    )


def on_nonfinite(run: TrainContext, why: str) -> None:
    """End the training at a number that is not finite, if the job asks for it."""
    if run.settings.on_nonfinite == "stop":
        raise_nonfinite(run, why)


def raise_nonfinite(run: TrainContext, why: str) -> NoReturn:
    """End the training. Raises `NonFiniteError`."""
    raise NonFiniteError(f"{why}; the newest checkpoint is of step {max(0, run.saves.kept_step)}")


def should_apply(run: TrainContext, norm: Tensor) -> bool:
    """Whether the current update is applied; if not, log and record why, and set whether the
    training must roll back.
    """
    assert run.guard is not None  # noqa: S101 - only then is anybody asked
    step = run.state.step + 1
    why = run.guard.judge(step, float(norm))
    if not why:
        return True
    run.stats.add_nonfinite("grad")
    run.saves.settle()  # what is kept is then the same on every rank
    run.must_go_back = (
        run.guard.rolls_back and run.saves.kept_step >= 0 and not run.guard.is_banned(step)
    )
    first, last = (
        run.state.samples_seen,
        run.state.samples_seen + run.loader.size(run.state.samples_seen) - 1,
    )
    if run.world.is_leader and not run.must_go_back:
        message = (
            f"the update of step {step} (samples {first} to {last} of the stream) is left "
            f"out: {why}"
        )
        log.warn("step-skipped", step=step, first=first, last=last, message=message)
    if not run.must_go_back:
        run.saves.diary.add_event("skipped", step=step, first=first, last=last, why=why)
    return False


def flush_pending_losses(run: TrainContext) -> None:
    """Collect every loss up to this step, and check that the state is consistent and finite. Raises
    `NonFiniteError`.
    """
    if run.records:
        run.exchange.post(SyncPayload(tuple(run.records), tuple(run.losses), run.norm))
        run.records.clear()
        run.losses.clear()
    while run.exchange.pending:
        record_interval(run, run.exchange.collect())
    run.flush()
    run.buffers.agree_on_late()
    if not run.must_go_back and not run.saves.weights_are_finite():
        on_nonfinite(run, f"a weight is NaN or infinite after step {run.state.step}")

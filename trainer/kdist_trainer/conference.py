"""What the ranks tell each other every few steps: losses, norms, clocks and flags, read one interval later."""

from __future__ import annotations

import math
import time
from typing import NoReturn

from torch import Tensor

from kdist_trainer import log
from kdist_trainer.failure import NonFinite
from kdist_trainer.profiling.recording import asked
from kdist_trainer.run import Run
from kdist_trainer.signals import Interval, Row, interval_of

PROGRESS_SECONDS = 1.0
"""Least time between two log lines of progress."""


def confer(run: Run) -> Interval:
    """Post this interval's losses and flags, and learn what all ranks said at the end of the one before."""
    if run.state.step == run.first_step:
        announce(run)
    said = note(run, run.exchange.collect()) if run.exchange.pending else Interval()
    flags = (run.flag.requested, run.saves.due_by_clock(), asked(run))
    run.exchange.post(Row(tuple(run.records), tuple(run.losses), run.norm, *flags))
    run.records.clear()
    run.losses.clear()
    run.saves.poll()
    steps = [run.state.step + run.interval, run.target, run.saves.due_after(run.state.step), run.evaluates_after(run.state.step)]
    run.boundary = min(step for step in steps if step is not None)
    return said


def announce(run: Run) -> None:
    """The first step of this generation is done: whoever waits for the recovery can stop the clock."""
    if run.world.is_leader:
        log.event("first-step", step=run.state.step)
        run.saves.diary.add_event("first_step", step=run.state.step)


def note(run: Run, said: Interval) -> Interval:
    """Take note of an interval's losses: ledger, metrics, log. Raises `NonFinite`."""
    run.saves.diary.add_steps(said.records, said.losses)
    run.interval = interval_of(said.step_seconds, run.settings.sync_every_steps)
    run.stats.loss, run.stats.grad_norm = said.losses[-1], said.norm
    run.stats.learning_rate = run.optimizer.param_groups[0]["lr"]
    run.resources.look()
    run.stats.tokens = run.stats.samples * run.workload.tokens_per_sample
    for record, loss in zip(said.records, said.losses, strict=True):
        run.curves.add_step(record.step, samples=record.last - record.first + 1, seconds=record.seconds, loss=loss)
        if not math.isfinite(loss):
            run.stats.add_nonfinite("loss")
            refuse(run, f"the loss of step {record.step} is {loss}")
    if run.world.is_leader and time.monotonic() - run.spoken_at >= PROGRESS_SECONDS:
        speak(run, said)
    return said


def speak(run: Run, said: Interval) -> None:
    """One log line on how far the training is."""
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


def refuse(run: Run, why: str) -> None:
    """Stop at a number that is not finite, if the job says so: nothing after it is worth keeping."""
    if run.settings.on_nonfinite == "stop":
        give_up(run, why)


def give_up(run: Run, why: str) -> NoReturn:
    """End the training. Raises `NonFinite`."""
    raise NonFinite(f"{why}; the newest checkpoint is of step {max(0, run.saves.kept_step)}")


def admit(run: Run, norm: Tensor) -> bool:
    """Whether the update of the step under way counts; if not, why, and whether the training must go back, is told to `run`."""
    assert run.guard is not None  # noqa: S101 - only then is anybody asked
    step = run.state.step + 1
    why = run.guard.judge(step, float(norm))
    if not why:
        return True
    run.stats.add_nonfinite("grad")
    run.saves.settle()  # what is kept is then the same on every rank
    run.must_go_back = run.guard.rolls_back and run.saves.kept_step >= 0 and not run.guard.is_banned(step)
    first, last = run.state.samples_seen, run.state.samples_seen + run.loader.size(run.state.samples_seen) - 1
    if run.world.is_leader and not run.must_go_back:
        message = f"the update of step {step} (samples {first} to {last} of the stream) is left out: {why}"
        log.warn("step-skipped", step=step, first=first, last=last, message=message)
    if not run.must_go_back:
        run.saves.diary.add_event("skipped", step=step, first=first, last=last, why=why)
    return False


def drain(run: Run) -> None:
    """Learn every loss up to this step, and make sure that the state is one and worth keeping. Raises `NonFinite`."""
    if run.records:
        run.exchange.post(Row(tuple(run.records), tuple(run.losses), run.norm))
        run.records.clear()
        run.losses.clear()
    while run.exchange.pending:
        note(run, run.exchange.collect())
    run.flush()
    run.buffers.agree_on_late()
    if not run.must_go_back and not run.saves.weights_are_finite():
        refuse(run, f"a weight is NaN or infinite after step {run.state.step}")

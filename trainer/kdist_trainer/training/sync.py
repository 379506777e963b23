"""SIGTERM on any rank becomes one decision of all ranks.

The handler only raises a flag. Every few steps the ranks gather one small row each - losses, their
clocks, their flags - in a single asynchronous collective that is read one interval later, when it
has long arrived: what all ranks read is the same, so they decide the same at the same step, and no
step ever waits for it.

What the ranks tell each other every few steps: losses, norms, clocks and flags, read one interval
later.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from kdist_trainer import log
from kdist_trainer.errors import NonFiniteError
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.profiler import asked
from kdist_trainer.world import World

AGREE_WITHIN_SECONDS: Final = 2.0
"""How soon after a request all ranks should act on it."""

_STOP, _SAVE, _PROFILE, _SECONDS, _NORM, _FLAGS = 0, 1, 2, 3, 4, 5


class StopFlag:
    """Raised by SIGTERM or SIGINT; a second SIGTERM ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._terminated = False

    def install(self) -> None:
        """Take over both signals. Main thread only."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._interrupt)

    def _terminate(self, number: int, _: FrameType | None) -> None:
        if self._terminated:
            os._exit(128 + number)
        self.requested = self._terminated = True

    def _interrupt(self, _number: int, _: FrameType | None) -> None:
        # Ctrl-C reaches every process of a terminal; what a second one means is the launcher's to
        # say
        self.requested = True


class StepRecord(NamedTuple):
    """One step as every rank knows it: number, positions of its first and last sample, this rank's
    seconds.
    """

    step: int
    first: int
    last: int
    seconds: float


class SyncPayload(NamedTuple):
    """What one rank says about the steps of an interval."""

    records: Sequence[StepRecord] = ()
    losses: Sequence[Tensor] = ()
    """This rank's share of each step's loss; the shares of those that count, divided by their
    number, are the mean loss.
    """
    norm: Tensor | None = None
    """Norm of the last step's gradient, the same on every rank."""
    stop: bool = False
    save: bool = False
    profile: bool = False


class Interval(NamedTuple):
    """What all ranks said about the steps of an interval; the same on every rank but for `records`'
    seconds.
    """

    records: Sequence[StepRecord] = ()
    losses: Sequence[float] = ()
    norm: float | None = None
    stop: bool = False
    save: bool = False
    profile: bool = False
    step_seconds: float = 0.0
    """Mean step time of the slowest rank; 0 where nothing was said yet."""


class _Posted(NamedTuple):
    row: SyncPayload
    rows: Callable[[], list[list[float]]]
    """Waits for the rows of all ranks, in their order."""


class SyncExchange:
    """Rows of all ranks, posted at the end of each interval and collected later; collective, same
    calls on every rank.

    Each rank has a slot of its own in the table that is all-reduced, and every rank adds the slots
    in the same order when it reads them: a sum made by the all-reduce itself would depend on the
    order in which it meets the ranks.
    """

    def __init__(self, world: World, *, most_steps: int, counts: bool = True) -> None:
        """`counts`: whether this rank's losses are heard; one rank of each copy of the model speaks
        for all of the copy.
        """
        self._world = world
        self._counts = counts
        self._shape = (world.size, _FLAGS + most_steps)
        self._posted: deque[_Posted] = deque()
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def post(self, row: SyncPayload) -> None:
        """Send this rank's row. Does not wait."""
        seconds = sum([record.seconds for record in row.records]) / max(1, len(row.records))
        flags = [float(row.stop), float(row.save), float(row.profile), seconds]
        post = self._post_from_cpu if self._stream is None else self._post_from_device
        self._posted.append(post(row, flags))

    def _post_from_cpu(self, row: SyncPayload, flags: list[float]) -> _Posted:
        losses = [loss.item() if self._counts else 0.0 for loss in row.losses]
        numbers = [*flags, math.nan if row.norm is None else row.norm.item(), *losses]
        if self._world.size == 1:
            return _Posted(row, lambda: [numbers])  # a group of one has said it all
        table = torch.zeros(self._shape, dtype=torch.float64)
        table[self._world.rank, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_reduce(table, async_op=True)

        def rows() -> list[list[float]]:
            work.wait()
            return table.tolist()

        return _Posted(row, rows)

    def _post_from_device(self, row: SyncPayload, flags: list[float]) -> _Posted:
        """Losses go from device to device and come to the CPU on a stream beside the training's:
        nothing waits for them.
        """
        device, own = self._world.device, self._world.rank
        table = torch.zeros(self._shape, dtype=torch.float64, device=device)
        table[own, : len(flags)] = (
            torch.tensor(flags, dtype=torch.float64).pin_memory().to(device, non_blocking=True)
        )
        table[own, _NORM] = math.nan if row.norm is None else row.norm
        if self._counts:
            table[own, _FLAGS : _FLAGS + len(row.losses)] = torch.stack(list(row.losses))
        work = dist.all_reduce(table, async_op=True)
        copy = torch.empty(self._shape, dtype=torch.float64, pin_memory=True)
        with torch.cuda.stream(self._stream):
            work.wait()
            copy.copy_(table, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        table.record_stream(self._stream)  # type: ignore[arg-type]  # its memory is not given to others before the copy

        def rows() -> list[list[float]]:
            copied.synchronize()
            return copy.tolist()

        return _Posted(row, rows)

    @property
    def pending(self) -> int:
        """Posts that were not collected yet."""
        return len(self._posted)

    def collect(self) -> Interval:
        """The oldest post of all ranks; waits for it where it is still under way."""
        row, rows = self._posted.popleft()
        said = rows()
        share = 1 / self._world.data_size
        return Interval(
            records=row.records,
            losses=[
                sum(slots) * share
                for slots in zip(
                    *[rank[_FLAGS : _FLAGS + len(row.losses)] for rank in said], strict=True
                )
            ],
            norm=None if row.norm is None else said[0][_NORM],
            stop=any(rank[_STOP] for rank in said),
            save=bool(said[0][_SAVE]),
            profile=any(rank[_PROFILE] for rank in said),
            step_seconds=max(rank[_SECONDS] for rank in said),
        )


def interval_of(step_seconds: float, most: int) -> int:
    """Steps in an interval: `most`, or fewer where steps are slow.

    A request waits for the end of one interval to be sent and for the end of the next to be read:
    the two together should last no longer than `AGREE_WITHIN_SECONDS`, where steps themselves are
    short enough for that.
    """
    if step_seconds <= 0:
        return 1
    return max(1, min(most, int(AGREE_WITHIN_SECONDS / 2 / step_seconds)))


PROGRESS_SECONDS = 1.0
"""Least time between two log lines of progress."""


def sync_ranks(run: TrainContext) -> Interval:
    """Post this interval's losses and flags, and learn what all ranks said at the end of the one
    before.
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
    """The first step of this generation is done: whoever waits for the recovery can stop the
    clock.
    """
    if run.world.is_leader:
        log.event("first-step", step=run.state.step)
        run.saves.diary.add_event("first_step", step=run.state.step)


def record_interval(run: TrainContext, said: Interval) -> Interval:
    """Take note of an interval's losses: ledger, metrics, log. Raises `NonFiniteError`."""
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


def on_nonfinite(run: TrainContext, why: str) -> None:
    """Stop at a number that is not finite, if the job says so: nothing after it is worth
    keeping.
    """
    if run.settings.on_nonfinite == "stop":
        raise_nonfinite(run, why)


def raise_nonfinite(run: TrainContext, why: str) -> NoReturn:
    """End the training. Raises `NonFiniteError`."""
    raise NonFiniteError(f"{why}; the newest checkpoint is of step {max(0, run.saves.kept_step)}")


def should_apply(run: TrainContext, norm: Tensor) -> bool:
    """Whether the update of the step under way counts; if not, why, and whether the training must
    go back, is told to `run`.
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
    """Learn every loss up to this step, and make sure that the state is one and worth keeping.
    Raises `NonFiniteError`.
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

"""Periodic synchronization of the ranks: an asynchronous all-reduce of losses, times and flags, and
what follows from it.

Every few steps each rank posts one small payload, which is collected one interval later, when the
all-reduce has long completed. All ranks collect the same values, so they decide the same at the
same step, and no step waits for the exchange. This is also how SIGTERM on any rank (`StopFlag`)
stops all of them at the same step. `sync_ranks` passes the results to the ledger, the metrics and
the log, and handles losses, gradients and weights that are not finite as `onNonfinite` asks.

After a recovery in place the ranks also compare digests of what they hold. A rank that has stayed
has what its model and optimizer keep in plain attributes, and a new rank has not: their weights may
differ from the next step on, and nothing else would show it. The digests travel with the losses of
the first step and before each save, so that no checkpoint is of ranks that differ.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from kdist_trainer import log
from kdist_trainer.distributed.world import World
from kdist_trainer.errors import NonFiniteError, PeersLostError, ReplicasDifferError
from kdist_trainer.metrics.transport import PROGRESS_SECONDS
from kdist_trainer.processes.signals import StopCounter
from kdist_trainer.state import digest_of
from kdist_trainer.training.carrying import CarriedNews

if TYPE_CHECKING:
    from kdist_trainer.training.context import TrainContext


REACT_WITHIN_SECONDS: Final = 2.0
"""How soon after a request all ranks should act on it."""

_STOP, _SAVE, _PROFILE, _SECONDS, _DIGEST, _COST, _CARRIED = range(7)
_NORM = _CARRIED + len(CarriedNews._fields)
_LOSSES = _NORM + 1
_NO_NEWS: Final = CarriedNews()


class StopFlag:
    """Set by SIGTERM or SIGINT; a second request by SIGTERM (`StopCounter`) ends the process at
    once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.leaves_group = False
        """Whether the agent asks this rank to leave its group, at once and without a save."""
        self._terminations = StopCounter()

    def install(self) -> None:
        """Install the handlers of both signals. Main thread only."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._interrupt)

    def ask_to_leave(self, leaves: bool) -> None:
        """Set whether this rank is to leave its group. Safe to call from any thread."""
        self.leaves_group = leaves

    def raise_if_leaving(self) -> None:
        """Raise `PeersLostError` if this rank is to leave its group: one that is alone waits in no
        collective that would raise.
        """
        if self.leaves_group:
            raise PeersLostError("the agent asks this rank to leave its group")

    def _terminate(self, number: int, _: FrameType | None) -> None:
        if self._terminations.add():
            os._exit(128 + number)
        self.requested = True

    def _interrupt(self, _number: int, _: FrameType | None) -> None:
        # Ctrl-C reaches every process of a terminal; the launcher decides what a second one means
        self.requested = True


class StepRecord(NamedTuple):
    """One step: number, positions of its first and last sample, this rank's seconds, and the
    learning rate that it was taken with, which may be a tensor.
    """

    step: int
    first: int
    last: int
    seconds: float
    learning_rate: float | Tensor | None = None


class SyncPayload(NamedTuple):
    """What one rank posts about the steps of an interval."""

    records: Sequence[StepRecord] = ()
    losses: Sequence[Tensor] = ()
    """This rank's part of each step's loss (scalars): the mean over the model replicas of the parts
    that are counted is the mean loss.
    """
    grad_norm: Tensor | None = None
    """Norm of the last step's gradient (a scalar), the same on every rank."""
    stop: bool = False
    save: bool = False
    profile: bool = False
    digest: int | None = None
    """Of what all ranks should hold alike, of at most 48 bits; None to compare nothing. All ranks
    post one or none does.
    """
    save_cost: float = 0.0
    """What a save costs this rank, in seconds; 0 if that is not known."""
    carried: CarriedNews = _NO_NEWS
    """What has become of the save that this rank writes alone."""


class IntervalResult(NamedTuple):
    """The collected results of all ranks for an interval; the same on every rank but for the
    seconds in `records`.
    """

    records: Sequence[StepRecord] = ()
    losses: Sequence[float] = ()
    """Mean loss of each step."""
    grad_norm: float | None = None
    stop: bool = False
    """Whether any rank was asked to stop."""
    save: bool = False
    """Whether a save is due by rank 0's clock."""
    profile: bool = False
    """Whether any rank has a profile request."""
    step_seconds: float = 0.0
    """Mean step time of the slowest rank; 0 if nothing was collected yet."""
    digests: Sequence[int] = ()
    """What all ranks have posted to be compared, by rank."""
    save_cost: float = 0.0
    """What a save costs the rank that pays most, in seconds; 0 if that is not known."""
    carried: CarriedNews = _NO_NEWS
    """What has become of the save that one rank writes alone."""


class _Posted(NamedTuple):
    payload: SyncPayload
    wait: Callable[[], list[list[float]]]
    """Waits for the rows of all ranks; returns them in rank order."""


class SyncExchange:
    """Exchanges the payloads of all ranks: posted at the end of each interval, collected at the end
    of the next. Collective: every rank makes the same calls.

    Each rank has a row of its own in the table that is all-reduced, and every rank adds up the rows
    in the same order: a sum made by the all-reduce itself would depend on its algorithm.
    """

    def __init__(self, world: World, *, max_steps: int, is_counted: bool) -> None:
        """Make an exchange for intervals of at most `max_steps`; `is_counted` says whether this
        rank's losses are included: one rank of each model replica posts them for the replica.
        """
        self._world = world
        self._is_counted = is_counted
        self._shape = (world.size, _LOSSES + max_steps)
        self._posted: deque[_Posted] = deque()
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def post(self, payload: SyncPayload) -> None:
        """Post this rank's payload. Does not wait."""
        records = payload.records
        seconds = sum([record.seconds for record in records]) / max(1, len(records))
        flags = [float(payload.stop), float(payload.save), float(payload.profile), seconds]
        flags.append(float(payload.digest or 0))
        flags += [payload.save_cost, *map(float, payload.carried)]
        post = self._post_from_cpu if self._stream is None else self._post_from_device
        self._posted.append(post(payload, flags))

    def _post_from_cpu(self, payload: SyncPayload, flags: list[float]) -> _Posted:
        losses = [loss.item() if self._is_counted else 0.0 for loss in payload.losses]
        norm = math.nan if payload.grad_norm is None else payload.grad_norm.item()
        row = [*flags, norm, *losses]
        if self._world.size == 1:
            return _Posted(payload, lambda: [row])
        table = torch.zeros(self._shape, dtype=torch.float64)
        table[self._world.rank, : len(row)] = torch.tensor(row, dtype=torch.float64)
        work = dist.all_reduce(table, async_op=True)

        def wait() -> list[list[float]]:
            work.wait()
            return table.tolist()

        return _Posted(payload, wait)

    def _post_from_device(self, payload: SyncPayload, flags: list[float]) -> _Posted:
        """Post without waiting for the device: losses stay there for the all-reduce and are copied
        to the CPU on a separate stream.
        """
        device, own = self._world.device, self._world.rank
        table = torch.zeros(self._shape, dtype=torch.float64, device=device)
        table[own, : len(flags)] = (
            torch.tensor(flags, dtype=torch.float64).pin_memory().to(device, non_blocking=True)
        )
        table[own, _NORM] = math.nan if payload.grad_norm is None else payload.grad_norm
        if self._is_counted:
            losses = torch.stack(list(payload.losses))
            table[own, _LOSSES : _LOSSES + len(payload.losses)] = losses
        work = dist.all_reduce(table, async_op=True)
        copy = torch.empty(self._shape, dtype=torch.float64, pin_memory=True)
        with torch.cuda.stream(self._stream):
            work.wait()
            copy.copy_(table, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        # keeps the table's memory from being reused before it is copied
        table.record_stream(self._stream)  # type: ignore[arg-type]

        def wait() -> list[list[float]]:
            copied.synchronize()
            return copy.tolist()

        return _Posted(payload, wait)

    @property
    def pending(self) -> int:
        return len(self._posted)

    def drain(self) -> list[tuple[SyncPayload, list[float] | None]]:
        """The posts that were not collected, after the connections between the ranks were cut, each
        with the mean losses if they had arrived.
        """
        drained: list[tuple[SyncPayload, list[float] | None]] = []
        while self._posted:
            payload, wait = self._posted.popleft()
            try:
                drained.append((payload, self._mean_losses(payload, wait())))
            except (RuntimeError, PeersLostError):
                drained.append((payload, None))
        return drained

    def _mean_losses(self, payload: SyncPayload, rows: list[list[float]]) -> list[float]:
        share = 1 / self._world.data_size
        losses = [row[_LOSSES : _LOSSES + len(payload.losses)] for row in rows]
        return [sum(parts) * share for parts in zip(*losses, strict=True)]

    def collect(self) -> IntervalResult:
        """Collect the oldest post of all ranks; waits if it is still in flight."""
        payload, wait = self._posted[0]
        rows = wait()
        self._posted.popleft()  # only now: if a rank is lost, `drain` returns it
        most = [max(column) for column in zip(*[row[:_NORM] for row in rows], strict=True)]
        carried = _NO_NEWS
        if carrier := next((row for row in rows if row[_CARRIED]), None):  # it writes a save alone
            step, nbytes, seconds = carrier[_CARRIED:_NORM]
            carried = CarriedNews(int(step), int(nbytes), seconds)
        return IntervalResult(
            records=payload.records,
            losses=self._mean_losses(payload, rows),
            grad_norm=None if payload.grad_norm is None else rows[0][_NORM],
            stop=bool(most[_STOP]),
            save=bool(rows[0][_SAVE]),
            profile=bool(most[_PROFILE]),
            step_seconds=most[_SECONDS],
            digests=() if payload.digest is None else [int(row[_DIGEST]) for row in rows],
            save_cost=most[_COST],
            carried=carried,
        )


def choose_sync_interval(step_seconds: float, max_steps: int) -> int:
    """Steps in a sync interval: `max_steps`, or fewer if steps are slow.

    A request is posted at the end of one interval and collected at the end of the next: together
    they should last no longer than `REACT_WITHIN_SECONDS`, if single steps are short enough for
    that. `step_seconds` is the mean step time of the slowest rank; 0 if it is unknown.
    """
    if step_seconds <= 0:
        return 1
    return max(1, min(max_steps, int(REACT_WITHIN_SECONDS / 2 / step_seconds)))


_HEX_DIGITS: Final = 12
"""48 bits, which a float of 64 bits holds exactly."""


def take_digest(ctx: TrainContext) -> int | None:
    """The digest of the weights and of the optimizer's state after this step; None if all ranks
    have begun alike, or have compared this step before.
    """
    if not ctx.continues_in_place or ctx.world.size == 1 or ctx.compared_step == ctx.state.step:
        return None
    ctx.compared_step = ctx.state.step
    trained = {one for group in ctx.optimizer.param_groups for one in group["params"]}
    weights = {name: one for name, one in ctx.module.named_parameters() if one in trained}
    optimizer = ctx.strategy.state_dict(ctx.optimizer)["optimizer"]
    return int(digest_of([weights, optimizer])[:_HEX_DIGITS], 16)


def check_replicas(ctx: TrainContext, result: IntervalResult) -> None:
    """End this group, by a `ReplicasDifferError` on all ranks, if ranks have posted different
    digests. Collective.
    """
    digests = result.digests
    if not digests:
        return
    others = [rank for rank, one in enumerate(digests) if one != digests[0]]
    if not others:
        return
    step = result.records[-1].step if result.records else ctx.state.step
    committed = max(0, ctx.checkpointing.committed_step)
    which = f"rank{'s'[: len(others) - 1]} {', '.join(map(str, others))}"
    what = (
        f"{which} hold{'s'[len(others) - 1 :]} other weights or optimizer states after step {step} "
        f"than rank 0, since a recovery in place before step {ctx.first_step}"
    )
    if ctx.world.is_rank_zero:
        message = (
            f"{what}: the optimizer or the model counts in plain attributes, which a new rank does "
            f"not have. All ranks start again from step {committed}, and from now on also where "
            "one is lost"
        )
        log.warn("replicas-differ", step=step, ranks=others, message=message)
        log.not_reproducible(f"{what}, so that all ranks start again with new plain attributes")
        ctx.step_log.add_event("replicas_differ", step=step, ranks=others)
    ctx.world.barrier()  # a rank that misses it would take the end of the others for a failure
    raise ReplicasDifferError(
        f"{what}; the training starts again from its newest checkpoint, of step {committed}"
    )


def sync_ranks(ctx: TrainContext) -> IntervalResult:
    """Post this interval's losses and flags, and collect those of all ranks for the previous
    interval. Collective. Raises `NonFiniteError` if a loss is not finite and the job asks to stop
    then.
    """
    if ctx.state.step == ctx.first_step and ctx.world.is_rank_zero:  # ends the recovery time
        log.event("first-step", step=ctx.state.step)
        seconds = round(ctx.checkpointing.clock.trained, 3)
        ctx.step_log.add_event("first_step", step=ctx.state.step, seconds=seconds)
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
            digest=take_digest(ctx) if ctx.state.step == ctx.first_step else None,
            save_cost=ctx.checkpointing.clock.interval.cost or 0.0,
            carried=ctx.checkpointing.carrying.news,
        )
    )
    ctx.checkpointing.poll()
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


def record_interval(ctx: TrainContext, result: IntervalResult) -> None:
    """Record an interval's losses in ledger, metrics and log.

    Raises:
        NonFiniteError: If a loss is not finite and the job asks to stop then.
        ReplicasDifferError: If ranks hold other values than they should.
    """
    # kept: where an evaluation or a save collects the exchange, the loop does not see its result
    ctx.stop_agreed |= result.stop
    ctx.profile_agreed |= result.profile
    check_replicas(ctx, result)
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
            if ctx.settings.on_nonfinite == "stop":
                end_nonfinite(ctx, f"the loss of step {record.step} is {loss}")
    if ctx.world.is_rank_zero and time.monotonic() - ctx.progress_logged_at >= PROGRESS_SECONDS:
        ctx.progress_logged_at = time.monotonic()
        total_seconds = sum(record.seconds for record in result.records)
        samples = result.records[-1].last - result.records[0].first + 1
        log.event(
            "progress",
            step=result.records[-1].step,
            target=ctx.target,
            loss=result.losses[-1],
            learning_rate=ctx.stats.learning_rate,
            samples_per_second=round(samples / total_seconds, 1) if total_seconds else None,
        )


def end_nonfinite(ctx: TrainContext, why: str) -> NoReturn:
    """End the training at a number that is not finite."""
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
    last = first + ctx.loader.steps.step_size(first) - 1
    if ctx.world.is_rank_zero:
        message = (
            f"the update of step {step} (samples {first} to {last} of the stream) is skipped: {why}"
        )
        log.warn("step-skipped", step=step, first=first, last=last, message=message)
    ctx.step_log.add_event("skipped", step=step, first=first, last=last, why=why)
    return False


def flush_pending_losses(ctx: TrainContext, *, check_weights: bool = True) -> None:
    """Collect every loss up to this step, and check that the state is consistent and, unless
    `check_weights` is false, that all weights are finite. Collective.

    Raises:
        NonFiniteError: If a loss or a weight is not finite and the job asks to stop then.
        ReplicasDifferError: If ranks hold other values than they should.
    """
    digest = take_digest(ctx)
    if ctx.step_records or digest is not None:
        records, losses = take_records(ctx)
        ctx.sync_exchange.post(SyncPayload(records, losses, ctx.grad_norm, digest=digest))
    while ctx.sync_exchange.pending:
        record_interval(ctx, ctx.sync_exchange.collect())
    ctx.reporter.flush()
    ctx.buffers.synchronize_late()
    is_finite = not check_weights or ctx.checkpointing.weights_are_finite()
    if not is_finite and ctx.settings.on_nonfinite == "stop":
        end_nonfinite(ctx, f"a weight is NaN or infinite after step {ctx.state.step}")

"""Periodic synchronization of the ranks: an asynchronous all-reduce of losses, times and flags.

Every few steps each rank posts one small payload, which is collected one interval later, when the
all-reduce has long completed. All ranks collect the same values, so they decide the same at the
same step, and no step waits for the exchange. This is also how SIGTERM on any rank (`StopFlag`)
stops all of them at the same step.
"""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kdist_trainer.errors import PeersLostError
from kdist_trainer.signals import StopCounter
from kdist_trainer.training.carried_news import CarriedNews
from kdist_trainer.world import World

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

    def __init__(self, world: World, *, max_steps: int, is_counted: bool = True) -> None:
        """Make an exchange.

        Args:
            world: The process group.
            max_steps: Most steps in an interval.
            is_counted: Whether this rank's losses are included; one rank of each model replica
                posts them for the replica.
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
        """Number of posts that were not collected yet."""
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
            carried=_read_news(rows),
        )


def _read_news(rows: Sequence[Sequence[float]]) -> CarriedNews:
    """What the one rank has posted that writes a save alone, if there is one."""
    for row in rows:
        if row[_CARRIED]:
            step, nbytes, seconds = row[_CARRIED:_NORM]
            return CarriedNews(int(step), int(nbytes), seconds)
    return _NO_NEWS


def choose_sync_interval(step_seconds: float, max_steps: int) -> int:
    """Steps in a sync interval: `max_steps`, or fewer if steps are slow.

    A request is posted at the end of one interval and collected at the end of the next: together
    they should last no longer than `REACT_WITHIN_SECONDS`, if single steps are short enough for
    that.

    Args:
        step_seconds: Mean step time of the slowest rank; 0 if it is unknown.
        max_steps: `train.syncEverySteps`.
    """
    if step_seconds <= 0:
        return 1
    return max(1, min(max_steps, int(REACT_WITHIN_SECONDS / 2 / step_seconds)))

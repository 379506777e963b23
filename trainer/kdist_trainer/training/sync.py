"""Periodic synchronization of the ranks: an asynchronous all-reduce of losses, times and flags.

Every few steps each rank posts one small row, which is collected one interval later, when the
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

from kdist_trainer.world import World

AGREE_WITHIN_SECONDS: Final = 2.0
"""How soon after a request all ranks should act on it."""

_STOP, _SAVE, _PROFILE, _SECONDS, _NORM, _FLAGS = 0, 1, 2, 3, 4, 5


class StopFlag:
    """Set by SIGTERM or SIGINT; a second SIGTERM ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._terminated = False

    def install(self) -> None:
        """Install the handlers of both signals. Main thread only."""
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
    """One step: number, positions of its first and last sample, and this rank's seconds."""

    step: int
    first: int
    last: int
    seconds: float


class SyncPayload(NamedTuple):
    """What one rank posts about the steps of an interval."""

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
    """The collected results of all ranks for an interval; the same on every rank but for `records`'
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
    """Exchanges rows of all ranks, posted at the end of each interval and collected later.
    Collective: every rank makes the same calls.

    Each rank has a slot of its own in the table that is all-reduced, and every rank adds the slots
    in the same order: a sum made by the all-reduce itself would depend on its algorithm.
    """

    def __init__(self, world: World, *, most_steps: int, counts: bool = True) -> None:
        """`counts`: whether this rank's losses are included; one rank of each copy of the model
        posts them for the copy.
        """
        self._world = world
        self._counts = counts
        self._shape = (world.size, _FLAGS + most_steps)
        self._posted: deque[_Posted] = deque()
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def post(self, row: SyncPayload) -> None:
        """Post this rank's row. Does not wait."""
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
        """Losses stay on the device for the all-reduce and are copied to the CPU on a separate
        stream: nothing waits for them.
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
        """Number of posts that were not collected yet."""
        return len(self._posted)

    def collect(self) -> Interval:
        """Collect the oldest post of all ranks; waits if it is still in flight."""
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
    """Steps in an interval: `most`, or fewer if steps are slow.

    A request is posted at the end of one interval and collected at the end of the next: together
    they should last no longer than `AGREE_WITHIN_SECONDS`, if single steps are short enough for
    that.
    """
    if step_seconds <= 0:
        return 1
    return max(1, min(most, int(AGREE_WITHIN_SECONDS / 2 / step_seconds)))

"""SIGTERM on any rank becomes one decision of all ranks.

The handler only raises a flag. Every few steps the ranks gather one small row each - losses, their clocks, their flags -
in a single asynchronous collective that is read one interval later, when it has long arrived: what all ranks read is the
same, so they decide the same at the same step, and no step ever waits for it.
"""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kdist_trainer.world import World

AGREE_WITHIN_SECONDS: Final = 2.0
"""How soon after a request all ranks should act on it."""

_STOP, _SAVE, _SECONDS, _NORM, _FLAGS = 0, 1, 2, 3, 4


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
        self.requested = True  # Ctrl-C reaches every process of a terminal; what a second one means is the launcher's to say


class StepRecord(NamedTuple):
    """One step as every rank knows it: number, positions of its first and last sample, this rank's seconds."""

    step: int
    first: int
    last: int
    seconds: float


class Row(NamedTuple):
    """What one rank says about the steps of an interval."""

    records: Sequence[StepRecord] = ()
    losses: Sequence[Tensor] = ()
    """This rank's share of each step's loss; the shares of all ranks, divided by their number, are the mean loss."""
    norm: Tensor | None = None
    """Norm of the last step's gradient, the same on every rank."""
    stop: bool = False
    save: bool = False


class Interval(NamedTuple):
    """What all ranks said about the steps of an interval; the same on every rank but for `records`' seconds."""

    records: Sequence[StepRecord] = ()
    losses: Sequence[float] = ()
    norm: float | None = None
    stop: bool = False
    save: bool = False
    step_seconds: float = 0.0
    """Mean step time of the slowest rank; 0 where nothing was said yet."""


class _Posted(NamedTuple):
    row: Row
    work: Any
    table: Tensor
    copied: torch.cuda.Event | None


class Exchange:
    """Rows of all ranks, posted at the end of each interval and collected later; collective, same calls on every rank."""

    def __init__(self, world: World, *, most_steps: int) -> None:
        self._world = world
        self._width = _FLAGS + most_steps
        self._posted: deque[_Posted] = deque()
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def post(self, row: Row) -> None:
        """Send this rank's row. Does not wait."""
        world, steps = self._world, len(row.losses)
        # A slot per rank, summed by every rank in the same order when it is read: the sum of an all-reduce itself would
        # depend on the order in which ranks are added.
        table = torch.zeros(world.size, self._width, dtype=torch.float64, device=world.device)
        seconds = sum(record.seconds for record in row.records) / max(1, steps)
        own = table[world.rank]
        own[:_FLAGS] = torch.tensor((row.stop, row.save, seconds, math.nan), dtype=torch.float64)
        if row.norm is not None:
            own[_NORM] = row.norm
        if steps:
            own[_FLAGS : _FLAGS + steps] = torch.stack(list(row.losses))
        work = dist.all_reduce(table, async_op=True)
        copied = None
        if self._stream is not None:  # wait and copy beside the training's stream, so that reading never stalls it
            with torch.cuda.stream(self._stream):
                work.wait()
                table = table.to("cpu", non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
        self._posted.append(_Posted(row, work, table, copied))

    @property
    def pending(self) -> int:
        """Posts that were not collected yet."""
        return len(self._posted)

    def collect(self) -> Interval:
        """The oldest post of all ranks; waits for it where it is still under way."""
        row, work, table, copied = self._posted.popleft()
        if copied is not None:
            copied.synchronize()
        else:
            work.wait()
        said = table.tolist()
        share = 1 / self._world.size
        return Interval(
            records=row.records,
            losses=[sum(rank[_FLAGS + index] for rank in said) * share for index in range(len(row.losses))],
            norm=None if row.norm is None else said[0][_NORM],
            stop=any(rank[_STOP] for rank in said),
            save=bool(said[0][_SAVE]),
            step_seconds=max(rank[_SECONDS] for rank in said),
        )


def interval_of(step_seconds: float, most: int) -> int:
    """Steps in an interval: `most`, or fewer where steps are slow.

    A request waits for the end of one interval to be sent and for the end of the next to be read: the two together should
    last no longer than `AGREE_WITHIN_SECONDS`, where steps themselves are short enough for that.
    """
    if step_seconds <= 0:
        return 1
    return max(1, min(most, int(AGREE_WITHIN_SECONDS / 2 / step_seconds)))

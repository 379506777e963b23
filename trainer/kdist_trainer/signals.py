"""SIGTERM on any rank becomes one decision of all ranks.

The handler only raises a flag. Every few steps the ranks gather one small row each - losses, their clocks, their flags -
in a single asynchronous collective that is read one interval later, when it has long arrived: what all ranks read is the
same, so they decide the same at the same step, and no step ever waits for it.
"""

from __future__ import annotations

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
"""A request is sent at the end of one interval and read at the end of the next: intervals last at most half of this."""

_STOP, _DUE, _SECONDS, _FLAGS = 0, 1, 2, 3


class StopFlag:
    """Raised by SIGTERM or SIGINT; a second SIGTERM ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take over both signals. Main thread only."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._interrupt)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.requested = True  # the terminal's Ctrl-C reaches every process; how often is the launcher's business


class Interval(NamedTuple):
    """What all ranks said about the steps of one interval; the same values on every rank."""

    last_step: int
    losses: list[float]
    """Of the whole step, all ranks together: one for each step up to `last_step`."""
    stop: bool
    save_due: bool
    slowest_step_seconds: float


class _Posted(NamedTuple):
    last_step: int
    steps: int
    work: Any
    table: Tensor
    event: torch.cuda.Event | None


class Exchange:
    """Rows of all ranks, posted at the end of each interval and collected later; collective, same calls on every rank."""

    def __init__(self, world: World, *, most_steps: int) -> None:
        self._world = world
        self._width = _FLAGS + most_steps
        self._posted: deque[_Posted] = deque()
        self._stream = torch.cuda.Stream() if world.device.type == "cuda" else None

    def post(self, losses: Sequence[Tensor], *, last_step: int, stop: bool, save_due: bool, step_seconds: float) -> None:
        """Send this rank's row: its share of the loss of each step since the last post, and its flags."""
        device = self._world.device
        row = torch.zeros(self._width, dtype=torch.float64, device=device)
        row[:_FLAGS] = torch.tensor((stop, save_due, step_seconds), dtype=torch.float64)
        if losses:
            row[_FLAGS : _FLAGS + len(losses)] = torch.stack(list(losses))
        table = torch.empty(self._world.size * self._width, dtype=torch.float64, device=device)
        work = dist.all_gather_into_tensor(table, row, async_op=True)
        event = None
        if self._stream is not None:  # wait and copy beside the training's stream, so that reading never stalls it
            with torch.cuda.stream(self._stream):
                work.wait()
                table = table.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()
        self._posted.append(_Posted(last_step, len(losses), work, table, event))

    @property
    def pending(self) -> int:
        """Posts that were not collected yet."""
        return len(self._posted)

    def collect(self) -> Interval:
        """The oldest post of all ranks; waits for it where it is still under way."""
        posted = self._posted.popleft()
        if posted.event is not None:
            posted.event.synchronize()
        else:
            posted.work.wait()
        rows = posted.table.view(self._world.size, self._width).tolist()
        mean = 1 / self._world.size  # each rank's share was scaled up by the world size, as DDP averages gradients
        losses = [sum(row[_FLAGS + index] for row in rows) * mean for index in range(posted.steps)]
        return Interval(
            last_step=posted.last_step,
            losses=losses,
            stop=any(row[_STOP] for row in rows),
            save_due=bool(rows[0][_DUE]),
            slowest_step_seconds=max(row[_SECONDS] for row in rows),
        )

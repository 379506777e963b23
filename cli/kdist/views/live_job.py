"""Draws a job on a cluster as a live view, in the form of `kdist run`'s. rich is imported here,
when something is drawn.
"""

from __future__ import annotations

import math
from collections import deque

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kdist.diagnose import Diagnosis, diagnose
from kdist.status import JobStatus, Phase, Snapshot
from kdist.units import number, seconds
from kdist.views import status_table

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 240
_WIDTH = 40
_MOST_ROWS = 16
_COLOURS = {
    Phase.RUNNING: "green",
    Phase.SUCCEEDED: "green",
    Phase.FAILED: "red",
    Phase.UNKNOWN: "red",
    Phase.RECOVERING: "yellow",
    Phase.PENDING: "yellow",
    Phase.QUEUED: "yellow",
}
_HINT = "Ctrl-C leaves the job alone"


class View:
    """Keeps what a single snapshot does not tell: how the loss went, and the pace."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._moves: deque[tuple[float, int]] = deque(maxlen=60)

    def draw(self, seen: Snapshot) -> RenderableType:
        """The whole view of one snapshot."""
        status = seen.status
        self._note(seen.taken, status)
        cause = diagnose(seen)
        return Group(
            Text(""),
            self._bar(seen.taken, status),
            self._numbers(status),
            _health(seen.taken, status, seen.gap),
            _ranks(status),
            _foot(cause),
        )

    def _note(self, now: float, status: JobStatus) -> None:
        if status.step is None or (self._moves and self._moves[-1][1] == status.step):
            return
        if self._moves and status.step < self._moves[-1][1]:
            self._moves.clear()
        self._moves.append((now, status.step))
        if status.loss is not None and math.isfinite(status.loss):
            self._losses.append(status.loss)

    def _seconds_left(self, now: float, status: JobStatus) -> float | None:
        if not status.target_steps or len(self._moves) < 2 or now - self._moves[-1][0] > 30:
            return None
        (since, first), (until, last) = self._moves[0], self._moves[-1]
        return (
            (status.target_steps - last) * (until - since) / (last - first)
            if last > first
            else None
        )

    def _bar(self, now: float, status: JobStatus) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        step, target = status.step or 0, status.target_steps
        left = self._seconds_left(now, status)
        row.add_row(
            Text(status.name, style="bold"),
            Text(str(status.phase), style=_COLOURS.get(status.phase, "")),
            ProgressBar(
                total=target or 1, completed=min(step, target) if target else 0, width=_WIDTH
            ),
            Text(f"step {step:,}" + (f"/{target:,}  {step / target:.0%}" if target else "")),
            Text("" if left is None else f"{seconds(left)} left", style="cyan"),
        )
        return row

    def _numbers(self, status: JobStatus) -> RenderableType:
        text = Text()
        if status.loss is not None:
            text.append("loss ").append(number(status.loss), style="bold").append("  ")
            text.append(_sparkline(list(self._losses)), style="green")
        if status.throughput is not None:
            text.append(f"   {number(round(status.throughput))} samples/s")
        if status.all_reduce_seconds is not None:
            text.append(f"   all-reduce {seconds(status.all_reduce_seconds)}")
        return text


def _sparkline(values: list[float]) -> str:
    """The values as a row of bars, the newest on the right; each bar is the mean of its share."""
    if not values:
        return ""
    share = max(1, -(-len(values) // _WIDTH))
    means = [
        sum(part) / len(part)
        for at in range(0, len(values), share)
        if (part := values[at : at + share])
    ]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _health(now: float, status: JobStatus, gap: str) -> RenderableType:
    left = f" ({status.restarts_left} left)" if status.restarts_left is not None else ""
    parts = [
        f"{status.nodes} nodes",
        *([f"{status.world_size} ranks"] if status.world_size else []),
    ]
    parts += [f"generation {status.generation}"] if status.generation else []
    parts.append(f"{status.restarts} restart{'' if status.restarts == 1 else 's'}{left}")
    saved = status_table.describe_checkpoint(status, now=now)
    parts.append(f"last checkpoint {saved}" if saved else "no checkpoint yet")
    parts += [gap] if gap else []
    return Text(" · ".join(parts), style="dim")


def _ranks(status: JobStatus) -> RenderableType:
    drawn = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in status_table.RANK_HEADER:
        drawn.add_column(name, justify="left" if name in ("POD", "STATUS", "NODE") else "right")
    rows = status_table.rank_rows(status)
    for row in rows[:_MOST_ROWS]:
        drawn.add_row(*row)
    if len(rows) > _MOST_ROWS:
        drawn.add_row(
            "…", f"{len(rows) - _MOST_ROWS} more", *[""] * (len(status_table.RANK_HEADER) - 2)
        )
    return drawn


def _foot(cause: Diagnosis) -> RenderableType:
    if cause.severity == "fine":
        return Text(_HINT, style="dim")
    return Text(f"… {cause.sentence}", style="yellow" if cause.severity == "waiting" else "red")

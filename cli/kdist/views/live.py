"""The live views of a job, on this machine or on a cluster, and of `kdist top`.

`from_progress` and `from_status` fill a `JobView`; `render` turns it into a renderable of rich.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from kdist.agents import metrics
from kdist.agents.metrics import AgentSample, RankBreakdown, mark_slow
from kdist.diagnose import Diagnosis
from kdist.events import Entry, describe_event
from kdist.job.local.progress import STALE_SECONDS, NodeProgress, Progress
from kdist.status import JobStatus
from kdist.status.step_history import StepHistory
from kdist.terminal import columns
from kdist.units import is_number, moment, seconds
from kdist.views import status_table, top
from kdist.views.frame import WATCH_HINT, JobView, RankTable, join_parts, render_print

_PACE_MAX_AGE = 30.0  # seconds since a step, after which there is no estimate
_FINE_PODS = ("Running", "Succeeded", "Completed")
_LEVEL_STYLES = {"warning": "yellow not dim", "error": "red not dim"}
_AGENT_DOWN = ("killed", "agent restarts")
_WITHOUT_RANKS = ("ended", "starting", *_AGENT_DOWN)
_WITHOUT_REPLIES = ("done", *_WITHOUT_RANKS)
_LOCAL_HEADER = ("NODE", "RANK", "STATE", "STEP", "STEP TIME", "BUSY", "HEARTBEAT")


def from_progress(progress: Progress, *, hint: str = "") -> JobView:
    """Build the view of a job that this process runs; `hint` says how to stop the job, and is shown
    while it does not wait for anything.
    """
    now = progress.clock()
    slow = _find_slow(rank for node in progress.nodes.values() for rank in node.ranks)
    rows = [row for node in progress.nodes.values() for row in _node_rows(node, now, slow)]
    saved_at = progress.saved_at
    return JobView(
        name=progress.job,
        ranks=RankTable(_LOCAL_HEADER, rows, keep=("NODE",)),
        step=progress.step if progress.managed or progress.step else None,
        target=progress.target,
        seconds_left=progress.seconds_left(),
        elapsed=max(0.0, now - progress.started_at),
        loss=progress.loss,
        losses=tuple(progress.history.losses),
        throughput=progress.rate,
        learning_rate=progress.learning_rate,
        world_size=progress.world,
        generation=progress.generation,
        restarts=progress.restarts,
        restarts_left=progress.left,
        checkpoint_step=progress.saved_step,
        checkpoint_age=None if saved_at is None else max(0.0, time.time() - saved_at),
        at_risk=progress.at_risk,
        progress_bars=list(progress.bars.values()),
        notice=progress.waiting_for() or "",
        hint=hint,
    )


def from_status(
    status: JobStatus, cause: Diagnosis, history: StepHistory, *, now: float, gap: str = ""
) -> JobView:
    """Build the view of a job that another process runs: on a cluster, or on this machine. The
    history has its present step and loss; `gap` is a sentence about what is missing from the
    status.
    """
    rows = _pod_rows(status)
    saved_at = status.last_checkpoint_time
    return JobView(
        name=status.name,
        ranks=RankTable(status_table.RANK_HEADER, rows, keep=("POD",)),
        phase=status.phase,
        step=status.step or 0,
        target=status.target_steps,
        seconds_left=history.seconds_left(now, status.target_steps, max_age=_PACE_MAX_AGE),
        loss=status.loss,
        losses=tuple(history.losses),
        throughput=status.throughput,
        all_reduce_seconds=status.all_reduce_seconds,
        nodes=str(status.nodes),
        world_size=status.world_size,
        generation=status.generation,
        restarts=status.restarts,
        restarts_left=status.restarts_left,
        checkpoint_step=status.last_checkpoint_step,
        checkpoint_age=None if saved_at is None else max(0.0, now - saved_at),
        at_risk=status.at_risk,
        gap=gap,
        notice="" if cause.severity == "fine" else cause.sentence,
        notice_style="yellow" if cause.severity == "waiting" else "red",
        hint=WATCH_HINT,
    )


def _pod_rows(status: JobStatus) -> list[list[Text]]:
    """The rows of `kdist status`, marked where a pod does not run or a rank is slow."""
    slow = _find_slow({"rank": one.rank, "busy_seconds": one.busy_seconds} for one in status.ranks)
    rows = []
    for cells in status_table.rank_rows(status):
        row = [Text(cell) for cell in cells]
        if cells[0] in {str(rank) for rank in slow}:
            row[2] = Text(f"{cells[2]}, slow", style="yellow")
        elif cells[2] not in _FINE_PODS:
            row[2].style = "yellow"
        rows.append(row)
    return rows


def _find_slow(ranks: Iterable[Mapping[str, Any]]) -> set[int]:
    """The ranks that are busy much longer than the median rank, as `kdist top` marks them."""
    rows = [
        RankBreakdown(rank["rank"], "", phases={"forward": float(rank["busy_seconds"])})
        for rank in ranks
        if is_number(rank.get("busy_seconds")) and isinstance(rank.get("rank"), int)
    ]
    return {row.rank for row in mark_slow(rows) if row.slow}


def _node_rows(node: NodeProgress, now: float, slow: set[int]) -> Iterator[list[Text]]:
    """Yield a row for each rank of a node, or one for the node where it has none."""
    silence = node.reply.silence(now) if node.reply else 0.0
    stale = silence > STALE_SECONDS and node.phase not in _WITHOUT_REPLIES
    state = f"no answer for {silence:.0f} s" if stale else node.phase
    failed = node.phase in ("failed", *_AGENT_DOWN)
    style = "red" if failed else "yellow" if stale else ""
    no_ranks: list[Mapping[str, Any]] = [{}]
    for rank in no_ranks if node.phase in _WITHOUT_RANKS else node.ranks or no_ranks:
        age = rank.get("heartbeat_age")
        late = isinstance(age, int | float) and age > metrics.MAX_HEARTBEAT_AGE
        is_slow = rank.get("rank") in slow and not style
        yield [
            Text(node.name),
            Text(_integer(rank, "rank")),
            Text(f"{state}, slow", style="yellow") if is_slow else Text(state, style=style),
            Text(_integer(rank, "step")),
            Text(_duration(rank, "step_seconds")),
            Text(_duration(rank, "busy_seconds")),
            Text(_duration(rank, "heartbeat_age"), style="red" if late else ""),
        ]


def _integer(rank: Mapping[str, Any], name: str) -> str:
    value = rank.get(name)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _duration(rank: Mapping[str, Any], name: str) -> str:
    value = rank.get(name)
    return seconds(value) if isinstance(value, int | float) else "-"


def render_entry(entry: Entry) -> RenderableType:
    """Render an entry as a line above the view: an event in the color of its level, printed text
    in its own colors.
    """
    if entry.event is None:
        return render_print(entry)
    level = str(entry.event.get("level"))
    stamp = _to_local(str(entry.event.get("time", "")))
    return Text(f"{stamp} {entry.node:<7} ", style="dim").append(
        describe_event(entry.event), style=_LEVEL_STYLES.get(level, "default not dim")
    )


def _to_local(stamp: str) -> str:
    """An event's time as the reader's clock shows it."""
    try:
        return moment(datetime.fromisoformat(stamp).timestamp())
    except ValueError:
        return stamp[11:19]


_SEPARATOR = " · "


class TopFrame:
    """One frame; rich draws it in the size that the terminal has at that moment."""

    def __init__(
        self,
        name: str,
        now: Mapping[str, AgentSample],
        rows: Sequence[RankBreakdown],
        rank: int | None,
    ) -> None:
        """Draw these rows, or only that of `rank`."""
        self._headline = top.headline(name, now)
        self._rows = metrics.select_rows(rows, rank)
        self._slow = list(metrics.describe_slow(rows))
        self._silent = not now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the frame."""
        width, height = options.max_width, console.size.height
        head = [Text(line, "bold") for line in join_parts(self._headline.split(_SEPARATOR), width)]
        foot = [*self._sentences(width, max_lines=max(1, height // 3)), Text(WATCH_HINT, "dim")]
        rows = height - 1 - len(head) - len(foot) - 2  # the table's header and its last line
        if len(self._rows) <= rows + 1:
            rows += 1
        table = _make_table(self._rows).render(width, rows) if rows > 0 and self._rows else []
        for line in [*head, *table, *foot][: max(1, height - 1)]:
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line

    def _sentences(self, width: int, max_lines: int) -> Iterator[Text]:
        """What is wrong, in whole sentences: as many as fit, and how many there are besides."""
        sentences = ["no agent answers"] if self._silent else self._slow
        lines = 0
        for place, sentence in enumerate(sentences):
            wrapped = columns.wrap(sentence, width)
            lines += len(wrapped)
            if place and lines > max_lines:
                yield Text(f"… {len(sentences) - place} more slow", "yellow")
                return
            yield from (Text(line, "yellow") for line in wrapped)


def _make_table(rows: Sequence[RankBreakdown]) -> RankTable:
    cells = [[Text(cell, "yellow" if row.slow else "") for cell in top.cells(row)] for row in rows]
    return RankTable(top.HEADER, cells, keep=("POD",))

"""The live view of a job, on this machine or on a cluster.

`from_progress` and `from_snapshot` fill a `JobView`; `render` turns it into a renderable of rich.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kdist.diagnose import diagnose
from kdist.events import Entry, describe_event
from kdist.local.progress import STALE_SECONDS, NodeProgress, Progress
from kdist.status import Phase, Snapshot
from kdist.status.step_history import StepHistory
from kdist.units import count, number, seconds
from kdist.views import status_table

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # columns of the progress bar and of the loss curve
_MAX_ROWS = 16  # ranks in the table
_MAX_HEARTBEAT_AGE = 10.0  # seconds, after which it is shown in red
_PACE_MAX_AGE = 30.0  # seconds since a step of a job on a cluster, after which there is no estimate
_CLUSTER_HINT = "Ctrl-C leaves the job alone"
_LEVEL_STYLES = {"warning": "yellow not dim", "error": "red not dim"}
_PHASE_STYLES = {
    Phase.RUNNING: "green",
    Phase.SUCCEEDED: "green",
    Phase.FAILED: "red",
    Phase.UNKNOWN: "red",
    Phase.RECOVERING: "yellow",
    Phase.PENDING: "yellow",
    Phase.QUEUED: "yellow",
}
_AGENT_DOWN = ("killed", "agent restarts")
_WITHOUT_RANKS = ("ended", "starting", *_AGENT_DOWN)
_WITHOUT_REPLIES = ("done", *_WITHOUT_RANKS)
_LOCAL_HEADER = ("NODE", "RANK", "STATE", "STEP", "STEP TIME", "BUSY", "HEARTBEAT")
_LEFT_ALIGNED = ("NODE", "POD", "STATE", "STATUS")


@dataclass(frozen=True)
class RankTable:
    """One row for each rank, and for each node or pod without ranks."""

    header: Sequence[str]
    rows: Sequence[Sequence[Text]]


@dataclass(frozen=True)
class JobView:
    """What a live view shows of a job. Values that are unknown are None and not shown.

    Attributes:
        name: name of the job.
        ranks: the table of ranks.
        phase: phase of a job on a cluster.
        step: last completed step.
        target: step at which the training ends.
        seconds_left: estimated seconds until then.
        elapsed: seconds since the start.
        losses: recent losses, the newest last.
        throughput: samples per second.
        all_reduce_seconds: seconds per step.
        nodes: nodes at work and wanted, such as `2/4`.
        restarts_left: restarts until the job fails.
        checkpoint_age: seconds since the last checkpoint.
        gap: what is missing from the view, in a sentence.
        progress_bars: newest states of the ranks' own progress bars.
        notice: what the job waits for or why it fails, in a sentence.
        notice_style: style of the notice.
        hint: shown where there is no notice.
    """

    name: str
    ranks: RankTable
    phase: Phase | None = None
    step: int | None = None
    target: int | None = None
    seconds_left: float | None = None
    elapsed: float | None = None
    loss: float | None = None
    losses: Sequence[float] = ()
    throughput: float | None = None
    learning_rate: float | None = None
    all_reduce_seconds: float | None = None
    nodes: str = ""
    world_size: int = 0
    generation: int = 0
    restarts: int = 0
    restarts_left: int | None = None
    checkpoint_step: int | None = None
    checkpoint_age: float | None = None
    gap: str = ""
    progress_bars: Sequence[Entry] = ()
    notice: str = ""
    notice_style: str = "yellow"
    hint: str = ""


def from_progress(progress: Progress, *, hint: str = "") -> JobView:
    """Build the view of a job on this machine.

    Args:
        progress: state of the job.
        hint: how to stop the job, shown while it does not wait for anything.
    """
    now = progress.clock()
    rows = [row for node in progress.nodes.values() for row in _node_rows(node, now)]
    saved_at = progress.saved_at
    return JobView(
        name=progress.job,
        ranks=RankTable(_LOCAL_HEADER, rows),
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
        restarts_left=None if progress.budget is None else progress.budget - progress.restarts,
        checkpoint_step=progress.saved_step,
        checkpoint_age=None if saved_at is None else max(0.0, time.time() - saved_at),
        progress_bars=list(progress.bars.values()),
        notice=progress.waiting_for() or "",
        hint=hint,
    )


def from_snapshot(snapshot: Snapshot, history: StepHistory) -> JobView:
    """Build the view of a job on a cluster.

    Args:
        snapshot: the job at one moment.
        history: steps and losses of the snapshots so far, this one included.
    """
    status = snapshot.status
    now = snapshot.taken
    rows = [[Text(cell) for cell in row] for row in status_table.rank_rows(status)]
    cause = diagnose(snapshot)
    saved_at = status.last_checkpoint_time
    return JobView(
        name=status.name,
        ranks=RankTable(status_table.RANK_HEADER, rows),
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
        gap=snapshot.gap,
        notice="" if cause.severity == "fine" else cause.sentence,
        notice_style="yellow" if cause.severity == "waiting" else "red",
        hint=_CLUSTER_HINT,
    )


def _node_rows(node: NodeProgress, now: float) -> Iterator[list[Text]]:
    """Yield a row for each rank of a node, or one for the node where it has none."""
    silence = node.reply.silence(now) if node.reply else 0.0
    stale = silence > STALE_SECONDS and node.phase not in _WITHOUT_REPLIES
    state = f"no answer for {silence:.0f} s" if stale else node.phase
    failed = node.phase in ("failed", *_AGENT_DOWN)
    style = "red" if failed else "yellow" if stale else ""
    no_ranks: list[Mapping[str, Any]] = [{}]
    for rank in no_ranks if node.phase in _WITHOUT_RANKS else node.ranks or no_ranks:
        age = rank.get("heartbeat_age")
        late = isinstance(age, int | float) and age > _MAX_HEARTBEAT_AGE
        yield [
            Text(node.name),
            Text(_integer(rank, "rank")),
            Text(state, style=style),
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


def render(view: JobView) -> RenderableType:
    """Render the view: progress, numbers, state, ranks, and a notice or a hint."""
    bars = [_render_print(entry) for entry in view.progress_bars[:_MAX_ROWS]]
    for bar in bars:
        bar.no_wrap = True
        bar.overflow = "ellipsis"
    footer = (
        Text(f"… {view.notice}", style=view.notice_style)
        if view.notice
        else Text(view.hint, style="dim")
    )
    return Group(
        Text(""),
        _render_progress(view),
        _render_numbers(view),
        _render_state(view),
        _render_ranks(view.ranks),
        *bars,
        footer,
    )


def render_entry(entry: Entry) -> RenderableType:
    """Render an entry as a line above the view: an event in the color of its level, printed text
    in its own colors.
    """
    if entry.event is None:
        return _render_print(entry)
    level = str(entry.event.get("level"))
    stamp = str(entry.event.get("time", ""))[11:19]
    return Text(f"{stamp} {entry.node:<7} ", style="dim").append(
        describe_event(entry.event), style=_LEVEL_STYLES.get(level, "default not dim")
    )


def _render_print(entry: Entry) -> Text:
    return Text("").append(f"{entry.prefix} ", style="cyan").append(Text.from_ansi(entry.body))


def _render_progress(view: JobView) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    step, target = view.step or 0, view.target
    bar = ProgressBar(total=target or 1, completed=min(step, target) if target else 0, width=_WIDTH)
    cells: list[RenderableType] = [Text(view.name, style="bold")]
    if view.phase is not None:
        cells.append(Text(str(view.phase), style=_PHASE_STYLES.get(view.phase, "")))
    cells += [bar, Text("" if view.step is None else _describe_step(step, target))]
    left = "" if view.seconds_left is None else f"{seconds(view.seconds_left)} left"
    cells.append(Text(left, style="cyan"))
    if view.elapsed is not None:
        cells.append(Text(f"{seconds(view.elapsed)} so far", style="dim"))
    row.add_row(*cells)
    return row


def _describe_step(step: int, target: int | None) -> str:
    return f"step {step:,}" + (f"/{target:,}  {step / target:.0%}" if target else "")


def _render_numbers(view: JobView) -> RenderableType:
    text = Text()
    if view.loss is not None:
        text.append("loss ").append(number(view.loss), style="bold").append("  ")
        text.append(sparkline(view.losses, _WIDTH), style="green")
    if view.throughput is not None:
        text.append(f"   {number(round(view.throughput))} samples/s")
    if view.learning_rate is not None:
        text.append(f"   learning rate {number(view.learning_rate, 3)}")
    if view.all_reduce_seconds is not None:
        text.append(f"   all-reduce {seconds(view.all_reduce_seconds)}")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as a row of bars, the newest on the right.

    Args:
        values: finite values.
        width: maximum number of bars; of more values, each bar is the mean of several.
    """
    if not values or width < 1:
        return ""
    chunk = max(1, -(-len(values) // width))
    chunks = [values[start : start + chunk] for start in range(0, len(values), chunk)]
    means = [sum(part) / len(part) for part in chunks]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _render_state(view: JobView) -> RenderableType:
    parts = [f"{view.nodes} nodes"] if view.nodes else []
    parts += [count(view.world_size, "rank")] if view.world_size else []
    parts += [f"generation {view.generation}"] if view.generation else []
    left = f" ({view.restarts_left} left)" if view.restarts_left is not None else ""
    parts.append(f"{count(view.restarts, 'restart')}{left}")
    saved = status_table.describe_checkpoint(view.checkpoint_step, view.checkpoint_age)
    parts.append(f"last checkpoint {saved}" if saved else "no checkpoint yet")
    parts += [view.gap] if view.gap else []
    return Text(" · ".join(parts), style="dim")


def _render_ranks(ranks: RankTable) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ranks.header:
        table.add_column(name, justify="left" if name in _LEFT_ALIGNED else "right")
    for row in ranks.rows[:_MAX_ROWS]:
        table.add_row(*row)
    hidden = len(ranks.rows) - _MAX_ROWS
    if hidden > 0:
        table.add_row("…", f"{hidden} more")
    return table

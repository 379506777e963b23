"""Draws a `Progress` as the live view: pure, from what is known to rich's renderables. rich is
imported here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kdist.events import Entry, describe_event
from kdist.local.progress import SLOW, NodeProgress, Progress
from kdist.units import number, seconds

_BARS = "▁▂▃▄▅▆▇█"
_LEVELS = {"warning": "yellow not dim", "error": "red not dim"}
_MOST_ROWS = 16  # ranks shown one by one; of more, the ones that stand out


def render_progress(progress: Progress, *, hint: str = "") -> RenderableType:
    """The whole view: progress, numbers, ranks, and what the job waits for or how to stop it."""
    waiting = progress.waiting_for()
    foot = Text(f"… {waiting}", style="yellow") if waiting else Text(hint, style="dim")
    bars = [_draw_print(entry) for entry in progress.bars.values()][:_MOST_ROWS]
    for bar in bars:
        bar.no_wrap, bar.overflow = True, "ellipsis"
    rows = (_bar(progress), _numbers(progress), _health(progress), _ranks(progress))
    return Group(Text(""), *rows, *bars, foot)


def draw_entry(entry: Entry) -> RenderableType:
    """One line that scrolls above the view: an event in its level's colour, or what a rank printed
    with its own colours.
    """
    if entry.event is None:
        return _draw_print(entry)
    level = str(entry.event.get("level"))
    stamp = str(entry.event.get("time", ""))[11:19]
    return Text(f"{stamp} {entry.node:<7} ", style="dim").append(
        describe_event(entry.event), style=_LEVELS.get(level, "default not dim")
    )


def _draw_print(entry: Entry) -> Text:
    speaker, text = entry.speaker
    return Text("").append(f"{speaker} ", style="cyan").append(Text.from_ansi(text))


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of bars, the newest on the right, at most `width` wide; each bar is the
    mean of its share.
    """
    if not values or width < 1:
        return ""
    share = max(1, -(-len(values) // width))
    means = [
        sum(values[at : at + share]) / len(values[at : at + share])
        for at in range(0, len(values), share)
    ]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _bar(progress: Progress) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    target = progress.target
    left = progress.seconds_left()
    row.add_row(
        Text(progress.job, style="bold"),
        ProgressBar(
            total=target or 1, completed=min(progress.step, target) if target else 0, width=40
        ),
        Text(
            ""
            if not (progress.managed or progress.step)
            else f"step {progress.step:,}"
            + (f"/{target:,}  {progress.step / target:.0%}" if target else "")
        ),
        Text("" if left is None else f"{seconds(left)} left", style="cyan"),
        Text(f"{seconds(max(0.0, progress.clock() - progress.began))} so far", style="dim"),
    )
    return row


def _numbers(progress: Progress) -> RenderableType:
    text = Text()
    if progress.loss is not None:
        text.append("loss ").append(number(progress.loss), style="bold").append("  ")
        text.append(sparkline(list(progress.losses), 40), style="green")
    if progress.rate is not None:
        text.append(f"   {number(round(progress.rate))} samples/s")
    if progress.learning_rate is not None:
        text.append(f"   learning rate {number(progress.learning_rate, 3)}")
    return text


def _health(progress: Progress) -> RenderableType:
    parts = (
        [f"{progress.world} ranks" if progress.world != 1 else "1 rank"] if progress.world else []
    )
    parts += [f"generation {progress.generation}"] if progress.generation else []
    left = f" ({progress.budget - progress.restarts} left)" if progress.budget is not None else ""
    parts.append(
        f"{progress.restarts} restarts{left}" if progress.restarts != 1 else f"1 restart{left}"
    )
    if progress.saved_step is not None and progress.saved_at is not None:
        age = time.time() - progress.saved_at
        parts.append(
            f"last checkpoint step {progress.saved_step:,}, "
            f"{f'{seconds(age)} ago' if age >= 1 else 'just now'}"
        )
    else:
        parts.append("no checkpoint yet")
    return Text(" · ".join(parts), style="dim")


def _ranks(progress: Progress) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("NODE", "RANK", "STATE", "STEP", "STEP TIME", "BUSY", "HEARTBEAT"):
        table.add_column(name, justify="left" if name in ("NODE", "STATE") else "right")
    rows = [row for node in progress.nodes.values() for row in _rows(node, progress.clock())]
    for row in rows[:_MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > _MOST_ROWS:
        table.add_row("…", "", f"{len(rows) - _MOST_ROWS} more", "", "", "", "")
    return table


def _rows(node: NodeProgress, now: float) -> Iterator[tuple[RenderableType, ...]]:
    silent = node.answer.silence(now) if node.answer else 0.0
    old = (
        bool(node.answer)
        and silent > SLOW
        and node.phase not in ("ended", "done", "killed", "starting", "agent restarts")
    )
    state = f"no answer for {silent:.0f} s" if old else node.phase
    shade = (
        "red" if node.phase in ("failed", "killed", "agent restarts") else "yellow" if old else ""
    )
    running = (
        node.ranks if node.phase not in ("ended", "killed", "agent restarts", "starting") else []
    )
    if not running:
        yield (
            Text(node.name),
            Text("-"),
            Text(state, style=shade),
            Text("-"),
            Text("-"),
            Text("-"),
            Text("-"),
        )
    for rank in running:
        yield (
            Text(node.name),
            Text(_shown(rank, "rank")),
            Text(state, style=shade),
            Text(_shown(rank, "step")),
            Text(_duration(rank, "step_seconds")),
            Text(_duration(rank, "busy_seconds")),
            Text(_duration(rank, "heartbeat_age"), style="red" if _late(rank) else ""),
        )


def _shown(rank: Mapping[str, Any], name: str) -> str:
    value = rank.get(name)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _duration(rank: Mapping[str, Any], name: str) -> str:
    value = rank.get(name)
    return "-" if not isinstance(value, int | float) else seconds(value)


def _late(rank: Mapping[str, Any]) -> bool:
    age = rank.get("heartbeat_age")
    return isinstance(age, int | float) and age > 10

"""One frame of a job's live view, arranged for the size of the terminal: `JobView` holds its
values, `RankTable` its table of ranks.

In a narrow terminal the progress bar, the loss curve and the less important numbers shrink or go;
in a low one ranks that are well go first, then the state and the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kdist.events import Entry
from kdist.status import Phase
from kdist.terminal import columns, keep_colors, to_terminal
from kdist.units import age, count, number, seconds
from kdist.views import status_table

_LEFT_ALIGNED = ("NODE", "POD", "STATE", "STATUS", "")


@dataclass(frozen=True)
class RankTable:
    """One row for each rank, and for each node or pod without ranks. A row with a colored cell is
    in trouble, and stays when there is no room for all.

    Attributes:
        header: names of the columns.
        rows: the cells.
        keep: columns that are never left out; long names in them are shortened.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Text]]
    keep: Sequence[str] = ()

    def render(self, width: int, max_rows: int) -> list[Text]:
        """Format the table for a terminal of so many columns; ranks beyond `max_rows` are counted
        in a last line.
        """
        shown = choose_rows(self.rows, max_rows)
        lines = [[Text(name) for name in self.header], *shown]
        widths = [max(line[index].cell_len for line in lines) for index in range(len(self.header))]
        kept, gap = columns.choose(self.header, widths, width, keep=self.keep)
        widths = columns.shrink(widths, kept, width, gap)
        found = [self._render_row(line, kept, widths, gap) for line in lines]
        found[0].stylize("dim")
        hidden = len(self.rows) - len(shown)
        return [*found, *([Text(f"… {count(hidden, 'more rank')}", "dim")] if hidden else [])]

    def _render_row(
        self, row: Sequence[Text], kept: Sequence[int], widths: Sequence[int], gap: int
    ) -> Text:
        cells = []
        for index in kept:
            plain = columns.shorten(row[index].plain, widths[index])
            left = self.header[index] in _LEFT_ALIGNED
            padded = plain.ljust(widths[index]) if left else plain.rjust(widths[index])
            cells.append(Text(padded, row[index].style))
        line = Text(" " * gap).join(cells)
        line.rstrip()
        return line


def choose_rows(rows: Sequence[Sequence[Text]], limit: int) -> list[Sequence[Text]]:
    """At most `limit` rows in their order: first those in trouble, then those at the beginning."""
    if len(rows) <= limit:
        return list(rows)
    order = sorted(
        range(len(rows)), key=lambda index: (not any(cell.style for cell in rows[index]), index)
    )
    return [rows[index] for index in sorted(order[: max(0, limit)])]


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
        at_risk: seconds of training that a loss of all ranks now would cost.
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
    at_risk: float | None = None
    gap: str = ""
    progress_bars: Sequence[Entry] = ()
    notice: str = ""
    notice_style: str = "yellow"
    hint: str = ""


WATCH_HINT = "Ctrl-C ends this view, not the job"
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # columns of the progress bar and of the loss curve
_MIN_WIDTH = 8  # columns, below which they are left out
_MAX_ROWS = 16  # ranks in the table, so that events above the view can be seen
_BLANK_LINE_ROWS = 20  # height of a terminal that has room for a blank line above the view
_PHASE_STYLES = {
    Phase.RUNNING: "green",
    Phase.SUCCEEDED: "green",
    Phase.FAILED: "red",
    Phase.UNKNOWN: "red",
    Phase.RECOVERING: "yellow",
    Phase.PENDING: "yellow",
    Phase.QUEUED: "yellow",
}


class Frame:
    """The view of a job; rich draws it in the size that the terminal has at that moment."""

    def __init__(self, view: JobView) -> None:
        """Draw this view."""
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the frame."""
        height = console.size.height
        for line in render_lines(self._view, options.max_width, height):
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line


def render_lines(view: JobView, width: int, height: int) -> list[Text]:
    """The lines of the frame, fewer than `height`, so that the cursor has a line below them."""
    progress = [_render_progress(view, width)]
    numbers = [line for line in [_render_numbers(view, width)] if line]
    state = _render_state(view, width)
    notice = f"… {view.notice}" if view.notice else view.hint
    style = view.notice_style if view.notice else "dim"
    footer = [Text(line, style) for line in columns.wrap(notice, width)]
    bars = [render_print(entry) for entry in view.progress_bars[: min(_MAX_ROWS, height // 3)]]
    blank = [Text("")] if height >= _BLANK_LINE_ROWS else []
    room = height - 1
    parts = [blank, progress, numbers, state, bars, footer]
    rows = room - sum(map(len, parts)) - 2  # the table's header and its last line
    if len(view.ranks.rows) <= rows + 1:
        rows += 1
    if rows > 0:
        ranks = view.ranks.render(width, min(rows, _MAX_ROWS)) if view.ranks.rows else []
        return [*blank, *progress, *numbers, *state, *ranks, *bars, *footer]
    for part in (bars, state, numbers):
        if sum(map(len, parts)) > room:
            part.clear()
    return [*blank, *progress, *numbers, *state, *bars, *footer][: max(1, room)]


def render_print(entry: Entry) -> Text:
    """Render printed text behind the prefix of its rank."""
    printed = Text.from_ansi(to_terminal(keep_colors(entry.body), color=True))
    return Text("").append(f"{entry.prefix} ", style="cyan").append(printed)


def _render_progress(view: JobView, width: int) -> Text:
    """Name, phase, bar, step and times; of the times, what there is room for."""
    step, target = view.step or 0, view.target
    phase = [Text(str(view.phase), _PHASE_STYLES.get(view.phase, ""))] if view.phase else []
    room = width - _width_of(phase) - min(len(view.name), _MIN_WIDTH) - 2
    steps = [Text(_describe_step(step, target, room))] if view.step is not None else []
    times = []
    if view.seconds_left is not None:
        times.append(Text(f"{age(view.seconds_left)} left", "cyan"))
    if view.elapsed is not None:
        times.append(Text(f"{age(view.elapsed)} so far", "dim"))
    while times and _width_of([*phase, *steps, *times]) + len(view.name) + 4 > width:
        times.pop()
    times = [Text(" · ", "dim").join(times)] if times else []
    rest = _width_of([*phase, *steps, *times])
    name = Text(columns.shorten(view.name, max(_MIN_WIDTH, width - rest - 1)), "bold")
    room = min(_WIDTH, width - rest - name.cell_len - 2)
    bar = [_render_bar(step / target if target else 0.0, room)] if room >= _MIN_WIDTH else []
    return Text(" ").join([name, *phase, *(bar if target else []), *steps, *times])


def _width_of(parts: Sequence[Text]) -> int:
    return sum(part.cell_len for part in parts) + max(0, len(parts) - 1)


def _render_bar(share: float, width: int) -> Text:
    done = min(width, round(share * width))
    return Text("━" * done, "green").append("╌" * (width - done), "dim")


def _describe_step(step: int, target: int | None, room: int) -> str:
    """The step in the longest form that has room."""
    if not target:
        return f"step {step:,}"
    share = f"{step / target:.0%}"
    forms = (f"step {step:,}/{target:,}  {share}", f"{step:,}/{target:,} {share}", share)
    return next((form for form in forms if len(form) <= room), share)


def _render_numbers(view: JobView, width: int) -> Text:
    """Loss, its curve, and further numbers, the most important first."""
    loss = Text("loss ").append(number(view.loss), "bold") if view.loss is not None else Text()
    parts = []
    if view.throughput is not None:
        parts.append(f"{number(round(view.throughput))} samples/s")
    if view.learning_rate is not None:
        parts.append(f"learning rate {number(view.learning_rate, 3)}")
    if view.all_reduce_seconds is not None:
        parts.append(f"all-reduce {seconds(view.all_reduce_seconds)}")

    def measure() -> int:
        return loss.cell_len + sum(3 + len(part) for part in parts)

    while parts and measure() > width:
        parts.pop()
    room = min(_WIDTH, width - measure() - 2)
    if view.loss is not None and room >= _MIN_WIDTH and (curve := sparkline(view.losses, room)):
        loss.append("  ").append(curve, "green")
    return Text("   ").join([*([loss] if loss else []), *map(Text, parts)])


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw finite values as a row of at most `width` bars, the newest on the right; of more values,
    each bar is the mean of several.
    """
    if not values or width < 1:
        return ""
    chunk = max(1, -(-len(values) // width))
    chunks = [values[start : start + chunk] for start in range(0, len(values), chunk)]
    means = [sum(part) / len(part) for part in chunks]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _render_state(view: JobView, width: int) -> list[Text]:
    """Nodes, ranks, restarts and the last checkpoint, in as many lines as they need."""
    parts = [f"{view.nodes} nodes"] if view.nodes else []
    parts += [count(view.world_size, "rank")] if view.world_size else []
    parts += [f"generation {view.generation}"] if view.generation else []
    left = status_table.describe_left(view.restarts, view.restarts_left)
    parts.append(f"{count(view.restarts, 'restart')}{left}")
    saved = status_table.describe_checkpoint(view.checkpoint_step, view.checkpoint_age)
    parts.append(f"last checkpoint {saved}" if saved else "no checkpoint yet")
    parts += [f"at risk {age(view.at_risk)}"] if view.at_risk is not None else []
    parts += [view.gap] if view.gap else []
    return [Text(line, "dim") for line in join_parts(parts, width)]


def join_parts(parts: Sequence[str], width: int) -> list[str]:
    """Join parts with ` · `, and begin a new line before one that does not fit."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines += columns.wrap(part, width)
    return lines

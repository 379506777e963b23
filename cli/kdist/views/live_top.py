"""The live view of `kdist top`, arranged for the size of the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kdist import agent_metrics, columns
from kdist.agent_metrics import AgentSample, RankBreakdown
from kdist.views import top
from kdist.views.frame import WATCH_HINT, join_parts
from kdist.views.rank_table import RankTable

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
        """Draw these rows.

        Args:
            name: name of the job.
            now: the newest sample of each agent.
            rows: one row per rank.
            rank: the only rank to show; None for all.
        """
        self._headline = top.headline(name, now)
        self._rows = agent_metrics.select_rows(rows, rank)
        self._slow = list(agent_metrics.describe_slow(rows))
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

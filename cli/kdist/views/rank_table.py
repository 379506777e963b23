"""The table of ranks in a live view, as large as the terminal allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from kdist import columns
from kdist.units import count

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
        """Format the table.

        Args:
            width: columns of the terminal.
            max_rows: ranks to show; the others are counted in a last line.
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

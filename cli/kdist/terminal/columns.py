"""Fits a table into the width of a terminal: which columns give way first, what is shortened, and
what is wrapped. Pure: text in, text out.

In this order, until the table fits: the gaps between columns shrink, the columns of `GIVE_WAY` are
left out from its beginning, text is wrapped between words, and long names lose their middle.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

GIVE_WAY = (
    "ALL-REDUCE",
    "OPTIMIZER",
    "CHECKPOINT",
    "FORWARD",
    "BACKWARD",
    "COLLECTIVES",
    "RUN",
    "BACKEND",
    "QUEUE",
    "SAMPLES",
    "RANKS",
    "KEPT",
    "FROM",
    "TYPE",
    "OBJECT",
    "LOSS",
    "NODE",
    "DATA",
    "COMM WAIT",
    "BUSY",
    "HEARTBEAT",
    "SIZE",
    "STEPS",
    "RESTARTS",
    "NODES",
    "AGE",
    "LOST",
    "STEP TIME",
    "POD",
)
"""Columns that a narrow terminal leaves out, the least important first. The others always stay."""
_GAP, _NARROW_GAP = 3, 2
_MIN_NAME = 12  # characters that a shortened name keeps
_MIN_WRAPPED = 24  # characters of a column of text, below which other columns are left out

Row = Sequence[str]


def choose(
    header: Row, widths: Sequence[int], available: int, *, keep: Sequence[str] = ()
) -> tuple[list[int], int]:
    """The indices of the columns to show in a terminal of this width, and the gap between two of
    them. Those in `keep` stay, although `GIVE_WAY` names them.
    """
    kept = list(range(len(header)))
    for gap in (_GAP, _NARROW_GAP):
        if _total(widths, kept, gap) <= available:
            return kept, gap
    dropped: list[int] = []
    for name in GIVE_WAY:
        if _total(widths, kept, _NARROW_GAP) <= available or len(kept) == 1:
            break
        if name in header and name not in keep:
            dropped.append(list(header).index(name))
            kept.remove(dropped[-1])
    for index in reversed(dropped):  # a narrow one may fit where a wide one did not
        if _total(widths, [*kept, index], _NARROW_GAP) <= available:
            kept = sorted([*kept, index])
    return kept, _NARROW_GAP


class Table:
    """A table as kubectl prints it: left-aligned columns without borders. Rows may come one after
    another: a column keeps its place until a cell needs more room.
    """

    def __init__(
        self, header: Row, *, with_header: bool = True, min_widths: Sequence[int] = ()
    ) -> None:
        """Begin without rows. An empty column name is a remark; `min_widths` count before rows are
        known.
        """
        self._header = tuple(header)
        self._with_header = with_header
        names = map(len, header if with_header else [""] * len(header))
        self._widths = list(map(max, names, min_widths or [0] * len(header)))
        self._texts = [False] * len(header)
        self._shown: list[int] | None = None  # columns under the last printed header

    def add(self, rows: Sequence[Row], width: int | None = None) -> list[str]:
        """Format rows that follow the earlier ones, for a terminal of this width, None for any. The
        header comes first, and again where other columns fit than before.
        """
        for row in rows:
            self._widths = [
                max(each, len(cell)) for each, cell in zip(self._widths, row, strict=True)
            ]
            self._texts = [text or " " in cell for text, cell in zip(self._texts, row, strict=True)]
        kept, widths, gap = self._arrange(width)
        begins = self._with_header and kept != self._shown
        self._shown = kept
        return [
            line
            for row in ([self._header] if begins else []) + [*map(tuple, rows)]
            for line in _format_row([row[index] for index in kept], widths, gap)
        ]

    def _arrange(self, available: int | None) -> tuple[list[int], list[int], int]:
        """The columns to show, their widths, and the gap between two of them."""
        kept, widths = list(range(len(self._header))), self._widths
        if available is None or _total(widths, kept, _GAP) <= available:
            return kept, widths, _GAP
        needed = [
            min(each, _MIN_WRAPPED) if text else each
            for each, text in zip(widths, self._texts, strict=True)
        ]
        keep = self._header if len(self._header) == 2 else ()  # names and values
        kept, gap = choose(self._header, needed, available, keep=keep)
        found = shrink(needed, kept, available, gap)
        for _ in range(available - _total(found, kept, gap)):  # left for those that lack most
            lacks = max(kept, key=lambda index: widths[index] - found[index])
            found[lacks] += widths[lacks] > found[lacks]
        return kept, [found[index] for index in kept], gap


def _total(widths: Sequence[int], kept: Sequence[int], gap: int) -> int:
    return sum(widths[index] for index in kept) + gap * (len(kept) - 1)


def _format_row(cells: Row, widths: Sequence[int], gap: int) -> list[str]:
    wrapped = [
        wrap(cell, width)
        if " " in cell
        else [cell if index and index == len(cells) - 1 else shorten(cell, width)]
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return [
        (" " * gap)
        .join(
            (lines[number] if number < len(lines) else "").ljust(width)
            for lines, width in zip(wrapped, widths, strict=True)
        )
        .rstrip()
        for number in range(max(map(len, wrapped), default=0))
    ]


def shrink(widths: Sequence[int], kept: Sequence[int], available: int, gap: int) -> list[int]:
    """Take what is too much from the widest of the columns `kept`, evenly."""
    found = list(widths)
    while _total(found, kept, gap) > available:
        widest = max(kept, key=lambda index: found[index])
        if found[widest] <= _MIN_NAME:
            break
        found[widest] -= 1
    return found


def shorten(text: str, width: int) -> str:
    """Replace the middle of a name by `…`, because names of pods differ at their end."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: max(0, width - 1 - tail)]}…{text[len(text) - tail :]}" if width > 1 else "…"


def wrap(text: str, width: int, *, indent: str = "") -> list[str]:
    """Break text without colors between words, so that words and paths stay whole; its own line
    breaks stay. Every line but the first starts with `indent`.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        start = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line,
            max(1, width),
            initial_indent=indent if lines else "",
            subsequent_indent=indent + start,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        ) or [""]
    return lines

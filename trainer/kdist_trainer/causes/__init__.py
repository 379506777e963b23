"""The table of causes: which failure is recognized by what, whose fault it is, whether a restart
may help, and what to do next. Each row names the line that its text is from.

`collectives`, `gpu` and `host` hold the rows, `row` says what a row is and has the words where none
says more, and `search` finds where an error was raised and looks it up. `kdist_trainer.errors`
classifies with it; records carry a row by its name.
"""

from __future__ import annotations

from kdist_trainer.causes.collectives import COLLECTIVES, SOCKETS
from kdist_trainer.causes.gpu import NUMBERED, WORDED
from kdist_trainer.causes.host import CODE, SYSTEM
from kdist_trainer.causes.row import Row

__all__ = ["BY_NAME", "TABLE", "Row"]

TABLE: tuple[Row, ...] = (*COLLECTIVES, *NUMBERED, *WORDED, *SYSTEM, *SOCKETS, *CODE)
"""In order: the first row that recognizes an error is its row."""
BY_NAME = {row.name: row for row in TABLE}

"""The table of causes: how each failure is recognized, whose fault it is, whether a restart may
help, and what to do next. Each row names the source of the text that it matches.

`collectives`, `gpu` and `host` hold the rows, `row` defines a row, `advice` has what is said of
failures without one, and `search` finds where an error was raised and looks it up.
`kdist_trainer.errors` classifies with it; records refer to a row by its name.
"""

from __future__ import annotations

from kdist_trainer.causes.collectives import COLLECTIVES, SOCKETS
from kdist_trainer.causes.gpu import NUMBERED, WORDED
from kdist_trainer.causes.host import CODE, SYSTEM
from kdist_trainer.causes.row import Row

__all__ = ["BY_NAME", "TABLE", "Row"]

TABLE: tuple[Row, ...] = (*COLLECTIVES, *NUMBERED, *WORDED, *SYSTEM, *SOCKETS, *CODE)
"""In order: the first row that matches an error applies."""
BY_NAME = {row.name: row for row in TABLE}

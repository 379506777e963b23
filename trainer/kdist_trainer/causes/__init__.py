"""The table of causes: which failure is recognized by what, whose fault it is, whether a restart
may help, and what to do next. Each row names the line that its text is from.

`cuda`, `gpu_libraries`, `collectives`, `system` and `code` hold the rows, `origin` says where an
error was raised, `search` looks one up, and `advice` fills in what to do. `general` has the
words where no row says more. `kdist_trainer.errors` classifies with it; records carry a row by its
name.
"""

from __future__ import annotations

from kdist_trainer.causes.code import CODE
from kdist_trainer.causes.collectives import COLLECTIVES, SOCKETS
from kdist_trainer.causes.cuda import NUMBERED
from kdist_trainer.causes.gpu_libraries import WORDED
from kdist_trainer.causes.row import Row
from kdist_trainer.causes.system import SYSTEM

__all__ = ["BY_NAME", "TABLE", "Row"]

TABLE: tuple[Row, ...] = (*COLLECTIVES, *NUMBERED, *WORDED, *SYSTEM, *SOCKETS, *CODE)
"""In order: the first row that recognizes an error is its row."""
BY_NAME = {row.name: row for row in TABLE}

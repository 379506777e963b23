"""kdist from Python, which `import kdist` offers by name: `kdist.load`, `kdist.train`, `kdist.get`.

Read `definition` first: a job that has not been started, from a file, from typed fields or from
code. It starts on this machine (`run`) or in a cluster (`apply`), which both return a handle:
`handle` is a job that was started, wherever it is. `code` makes a job of a function, or of a
workload's class, of a notebook. `generated` is the module that its ranks import: `sources` finds
the statements of functions and classes, `values` writes values as expressions, and `modules` copies
the modules of one's own. `words` has errors in the words of Python.

Nothing here prints: what commands say meanwhile is logged as `kdist`, and what they warn of is a
`KdistWarning` of Python's `warnings`, at the line of the program. Errors are the commands'. A run
is a process of its own session: it needs nothing of the caller's main module, starts from any
thread, and goes on when the caller ends.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from pathlib import Path
from traceback import walk_stack
from typing import TypeAlias

from kdist.errors import KdistWarning, UsageError
from kdist.job.job import Dialog
from kdist.units import parse_duration

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def _warn(text: str) -> None:
    files = (frame.f_code.co_filename for frame, _ in walk_stack(inspect.currentframe()))
    outside = (level for level, file in enumerate(files, 1) if not file.startswith(_PACKAGE))
    warnings.warn(text, KdistWarning, stacklevel=next(outside, 1))


DIALOG = Dialog(logging.getLogger("kdist").info, _warn)
"""Logs what an operation says, warns, and agrees to nothing."""


Timeout: TypeAlias = float | str | None
"""Seconds, or a text such as `5m`; None for what the method says."""


def read_timeout(timeout: Timeout) -> float | None:
    """The seconds of a time-out. Raises `UsageError` for anything else."""
    if timeout is None or (isinstance(timeout, int | float) and timeout >= 0):
        return timeout
    try:
        return parse_duration(str(timeout))
    except ValueError as error:
        raise UsageError(f"timeout: {error}") from None

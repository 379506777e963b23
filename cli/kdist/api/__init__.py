"""kdist from Python, which `import kdist` offers by name: `kdist.load`, `kdist.train`, `kdist.get`.

Read `definition` first: a job that has not been started, from a file, from typed fields or from
code. It starts on this machine (`run`) or in a cluster (`apply`), which both return a handle:
`handle` is a job that was started, wherever it is. `code` turns a function, or a workload's class,
of a notebook into files that its ranks import.

Nothing here prints: what commands say meanwhile is logged as `kdist`. Errors are the commands'. A
run is a process of its own session: it needs nothing of the caller's main module, starts from any
thread, and goes on when the caller ends.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TypedDict

from kdist.job.job import Dialog


def _log(level: int, text: str) -> None:
    logger = logging.getLogger("kdist")
    if logger.hasHandlers():  # or Python would print warnings
        logger.log(level, "%s", text)


DIALOG = Dialog(partial(_log, logging.INFO), partial(_log, logging.WARNING))
"""Logs what an operation says, and agrees to nothing."""


class Where(TypedDict, total=False):
    """Which cluster is meant: a namespace, a context of the kubeconfig, and its file, as -n,
    --context and --kubeconfig say it.
    """

    namespace: str | None
    context: str | None
    kubeconfig: str | None

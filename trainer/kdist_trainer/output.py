"""Redirects a rank's standard output and standard error into two named pipes that its agent reads.

The agent prefixes every line with the rank. A rank without an agent keeps its streams.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

STREAMS = (1, 2)
"""The descriptors of standard output and standard error."""


def pipe_path(scratch: Path, local_rank: int, stream: int) -> Path:
    """The named pipe of one stream of a rank."""
    return scratch / f"rank-{local_rank}.{'stdout' if stream == 1 else 'stderr'}"


def redirect(scratch: Path, local_rank: int) -> None:
    """Write standard output and standard error of this process, and of its children, to the agent's
    pipes.
    """
    for stream in STREAMS:
        # Non-blocking: there is no reader if the agent that created the pipe has died.
        with contextlib.suppress(OSError):
            path = pipe_path(scratch, local_rank, stream)
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(pipe, True)
            os.dup2(pipe, stream)
            os.close(pipe)

"""Redirects a rank's standard output, standard error and events into named pipes that its agent
reads.

The agent prefixes every line of the former two with the rank, and takes no such line for an event.
A rank without an agent keeps its streams.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path

from kdist_trainer import log

STREAMS = (1, 2)
"""The descriptors of standard output and standard error."""
EVENTS = 3
"""Stands for the stream of events, which has a descriptor of any number."""
EARLY = "early"
"""Stands for the local rank of all workers that have none yet."""
_NAMES = {1: "stdout", 2: "stderr", EVENTS: "events"}
_events: int | None = None


def pipe_path(scratch: Path, local_rank: int | str, stream: int) -> Path:
    """The named pipe of one stream of a rank."""
    return scratch / f"rank-{local_rank}.{_NAMES[stream]}"


def redirect(scratch: Path, local_rank: int | str) -> None:
    """Write standard output and standard error of this process and of its children, and its events,
    to the agent's pipes.
    """
    global _events
    for stream in STREAMS:
        with contextlib.suppress(OSError):
            pipe = _open(pipe_path(scratch, local_rank, stream))
            os.dup2(pipe, stream)
            os.close(pipe)
    with contextlib.suppress(OSError):
        pipe = _open(pipe_path(scratch, local_rank, EVENTS))
        before, _events = _events, pipe
        log.write_to(partial(_write, pipe, os.fstat(pipe)))
        if before is not None:
            os.close(before)


def _open(path: Path) -> int:
    # Non-blocking: there is no reader if the agent that created the pipe has died.
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    return pipe


def _write(pipe: int, opened: os.stat_result, line: bytes) -> None:
    # the training may have closed the pipe, and opened a file of its own in its place
    if os.path.samestat(os.fstat(pipe), opened):
        os.write(pipe, line)

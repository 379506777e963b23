"""Stacks of a rank that a signal such as SIGSEGV ends, written by faulthandler.

They go to a file that the agent reads. Where the user has enabled faulthandler
(PYTHONFAULTHANDLER), its output stays where the user wants it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from pathlib import Path

from kdist_trainer.errors import is_user_code
from kdist_trainer.failure import TRACEBACK_LINES

SIGNALS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""The signals that faulthandler writes the stacks for."""
_MAX_BYTES = 1 << 16
_FRAME = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')


def stacks_path(scratch: Path, local_rank: int) -> Path:
    """The file for a rank's stacks, which are dumped on SIGUSR2."""
    return scratch / f"rank-{local_rank}.stacks"


def register_stack_dump(scratch: Path, local_rank: int) -> None:
    """Write the stacks of all threads to the rank's file on SIGUSR2, or to stderr if the disk is
    full.
    """
    try:
        # The file stays open: the handler writes to its descriptor, even if Python is blocked.
        faulthandler.register(
            signal.SIGUSR2, file=stacks_path(scratch, local_rank).open("w"), all_threads=True
        )
    except OSError:
        faulthandler.register(signal.SIGUSR2, all_threads=True)


def path_of(scratch: Path, local_rank: int) -> Path:
    """File with a rank's last stacks."""
    return scratch / f"rank-{local_rank}.crash"


def watch(scratch: Path, local_rank: int) -> None:
    """Write the stacks of this process to its file when a fatal signal ends it."""
    if os.environ.get("PYTHONFAULTHANDLER"):
        return
    try:
        faulthandler.enable(file=path_of(scratch, local_rank).open("w"))
    except OSError:  # the disk is full: write to stderr
        faulthandler.enable()


def read(scratch: Path, local_rank: int) -> tuple[tuple[str, ...], str | None]:
    """Read the stack that a crashed rank left.

    Args:
        scratch: the agent's folder.
        local_rank: the rank on this node.

    Returns:
        The lines of the thread that crashed, innermost last, and the last of them in the user's
        code. No lines if there are none or the thread is unknown.
    """
    try:
        with path_of(scratch, local_rank).open(encoding="utf-8", errors="replace") as left:
            text = left.read(_MAX_BYTES)
    except OSError:
        return (), None
    # A child process that crashed earlier has written to the same file.
    _, current, rest = text.rpartition("Current thread ")
    if not current:
        return (), None
    thread = rest.partition("\n\n")[0].splitlines()
    frames = [frame for line in reversed(thread) if (frame := _FRAME.fullmatch(line))]
    shown = [f'File "{frame[1]}", line {frame[2]}, in {frame[3]}' for frame in frames]
    own = [line for line, frame in zip(shown, frames, strict=True) if is_user_code(frame[1])]
    return tuple(shown[-TRACEBACK_LINES:]), own[-1] if own else None

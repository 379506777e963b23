"""Stacks of a rank, written by faulthandler: on request, and when a signal such as SIGSEGV ends it.

They go to a file that the agent reads. Where the user has enabled faulthandler
(PYTHONFAULTHANDLER), its output stays where the user wants it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from pathlib import Path
from typing import Final

from kdist_trainer.errors import is_user_code
from kdist_trainer.ipc.failure import TRACEBACK_LINES

DUMP: Final = signal.SIGUSR2
"""The signal on which a rank writes the stacks of all its threads, and continues."""
LOOK: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""The signal on which a rank writes where its main thread stands, and continues. It is a real-time
one, since scripts have uses of their own for SIGUSR1 and SIGUSR2. None where the system has none.
"""
SIGNALS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""The signals that faulthandler writes the stacks for."""
_MAX_BYTES = 1 << 16
_FRAME = re.compile(r'\s+File "(.*)", line (\d+) in (.*)')


def stacks_path(scratch: Path, local_rank: int) -> Path:
    """The file for a rank's stacks, which are written on `DUMP`."""
    return scratch / f"rank-{local_rank}.stacks"


def install(scratch: Path, local_rank: int) -> None:
    """Write the stacks of this process to the rank's files, or to stderr if the disk is full: of
    all threads on `DUMP`, of the main thread on `LOOK`, and when a fatal signal ends it.
    """
    try:
        # The file stays open: the handler writes to its descriptor, even if Python is blocked.
        faulthandler.register(
            DUMP, file=stacks_path(scratch, local_rank).open("w"), all_threads=True
        )
    except OSError:
        faulthandler.register(DUMP, all_threads=True)
    if LOOK is not None:
        # the agent empties the file, so what is written is appended
        with contextlib.suppress(OSError):
            faulthandler.register(
                LOOK, file=look_path(scratch, local_rank).open("a"), all_threads=False
            )
    if os.environ.get("PYTHONFAULTHANDLER"):
        return
    try:
        faulthandler.enable(file=path_of(scratch, local_rank).open("w"))
    except OSError:
        faulthandler.enable()


def look_path(scratch: Path, local_rank: int) -> Path:
    """The file for the stack of a rank's main thread, which is written on `LOOK`."""
    return scratch / f"rank-{local_rank}.look"


def read_line(scratch: Path, local_rank: int) -> str:
    """The line at which a rank's main thread stood at the last look, such as `train.py:24 in step`:
    the innermost of the user's own code, else of any. Empty if there is none.
    """
    try:
        with look_path(scratch, local_rank).open(encoding="utf-8", errors="replace") as left:
            text = left.read(_MAX_BYTES)
    except OSError:
        return ""
    found = [frame for line in text.splitlines() if (frame := _FRAME.fullmatch(line))]
    chosen = next((frame for frame in found if is_user_code(frame[1])), found[0] if found else None)
    return "" if chosen is None else f"{Path(chosen[1]).name}:{chosen[2]} in {chosen[3]}"


def path_of(scratch: Path, local_rank: int) -> Path:
    """File with a rank's last stacks."""
    return scratch / f"rank-{local_rank}.crash"


def read(scratch: Path, local_rank: int) -> tuple[tuple[str, ...], str | None]:
    """Read the stack that a crashed rank left: the lines of the thread that crashed, innermost
    last, and the last of them in the user's code. No lines if there are none or the thread is
    unknown.
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

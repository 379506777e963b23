"""What an agent's ranks have started and what outlives them all: found by the environment that it inherited, and killed.

An agent ends what is below it while it lives, and its ranks do so when it has gone. A daemon that a rank had started, in a
session of its own and without a parent, is nobody's then: its environment still says which agent it comes from.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "KDIST_SCRATCH"
"""The variable that tells an agent, and whatever comes from it, from all others: its scratch folder."""

_LOOK_SECONDS = 0.01


def find(scratch: str) -> list[int]:
    """Pids of the processes that come from the agent with this scratch folder; none where the system does not show them."""
    mark = f"{MARK}={scratch}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def kill(scratch: str, *, seconds: float = 2.0) -> None:
    """Kill them until there are none, for so many seconds at most. Call it when the agent has ended."""
    deadline = time.monotonic() + seconds
    while (found := find(scratch)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)

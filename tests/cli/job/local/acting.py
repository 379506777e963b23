"""A real process that keeps to an agent's contract with `kdist run` and ends as a test wants it to.

    python acting.py COUNTER PIPE END…

Its n-th start (counted in the file COUNTER) acts the n-th END: a number exits with it, `kill` dies
by SIGKILL, `wait` exits with 200 when it is told to stop, `wait70` with 70, `deaf` ignores that.
The last END is acted again and again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from kdist_trainer.processes.liveness import watch


def act(end: str) -> None:
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end.startswith("wait") or end == "deaf":
        stop = threading.Event()
        signal.signal(
            signal.SIGTERM, (lambda *_: None) if end == "deaf" else (lambda *_: stop.set())
        )
        sys.stderr.write("ready\n")
        while not stop.wait(0.05):
            pass
        sys.exit(int(end.removeprefix("wait") or 200))
    sys.exit(int(end))


def main() -> None:
    counter, pipe, *ends = sys.argv[1:]
    if pipe != "-":
        watch(Path(pipe))
    path = Path(counter)
    start = int(path.read_text()) if path.exists() else 0
    path.write_text(str(start + 1))
    act(ends[min(start, len(ends) - 1)])


if __name__ == "__main__":
    main()

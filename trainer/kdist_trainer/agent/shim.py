"""Stands for one agent that is forked by the spawner: `python -m kdist_trainer.agent.shim`, then an
agent's command line.

`kdist run` starts, signals and waits for this process as it would for the agent. It has the spawner
fork the agent, hands signals on, and ends as the agent ended; when it is killed, so is the agent.
Without a spawner it becomes the agent itself. Imports nothing but the standard library: it has to
be there at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

SPAWNER = "KDIST_SPAWNER"
"""The variable with the number of the descriptor by which the spawner takes requests."""
_STOPPED = 200  # Exit.STOPPED, whose module takes half a second to import


class Shim:
    """One agent as seen by its shim: the `connection` to the spawner, and the pid
    once it has one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid: int | None = None

    def wait(self) -> int | None:
        """The exit status of the agent, negative for a signal; None if the spawner ended before it
        had forked one.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        with suppress(ConnectionError), self._connection.makefile("rb") as lines:
            for line in lines:
                said = json.loads(line)
                if "code" in said:
                    return int(said["code"])
                self._pid = said["pid"]
        if self._pid is None:
            return None
        with suppress(ProcessLookupError):  # how it ends, nobody could tell
            os.killpg(self._pid, signal.SIGKILL)
        return -signal.SIGKILL

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._pid is None:
            os._exit(_STOPPED)  # the spawner is still importing torch: there is nothing to save
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)


def ask(arguments: list[str]) -> socket.socket | None:
    """Ask the spawner for an agent with this command line and this process's environment, folder
    and output.

    Returns the connection for the reply; None without a spawner.
    """
    descriptor = os.environ.pop(SPAWNER, None)
    if descriptor is None:
        return None
    ours, theirs = socket.socketpair()
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
    }
    try:
        with socket.socket(fileno=int(descriptor)) as spawner, theirs:
            socket.send_fds(spawner, [b"fork"], [theirs.fileno(), 1, 2])
        ours.sendall(json.dumps(request).encode() + b"\n")
    except OSError:
        ours.close()
        return None
    return ours


def main() -> NoReturn:
    """Run the agent of this command line until it exits."""
    connection = ask(sys.argv[1:])
    code = Shim(connection).wait() if connection is not None else None
    if code is None:
        command = [sys.executable, "-m", "kdist_trainer", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - no shell is meant
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other handling
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()

"""Represents one agent that the spawner forks: `python -m kdist_trainer.processes.shim`, then an
agent's command line.

`kdist run` starts, signals and waits for this process as it would for the agent. The shim has the
spawner fork the agent, forwards signals, and exits as the agent exited; when it is killed, so is
the agent. Without a spawner it becomes the agent itself. It imports only the standard library, to
start at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kdist_trainer.formats import SPAWNER
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_object

STARTED_AT = "KDIST_STARTED_AT"
"""The variable with the monotonic time at which an agent was asked for, before what it imports."""
_STOPPED = 200  # Exit.STOPPED, whose module takes half a second to import


class Shim:
    """One agent, as its shim sees it through the `connection` to the spawner."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid: int | None = None

    def wait(self) -> int | None:
        """Wait for the agent; returns its exit status, negative for a signal, or None if the
        spawner exited before the fork.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)
        with suppress(ConnectionError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = parse_object(line)
                if "code" in message:
                    return int(message["code"])
                self._pid = message["pid"]
        if self._pid is None:
            return None
        with suppress(ProcessLookupError):  # no exit status would arrive any more
            os.killpg(self._pid, signal.SIGKILL)
        return -signal.SIGKILL

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._pid is None:
            os._exit(_STOPPED)  # the spawner still imports torch, so there is nothing to save
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)


def request_agent(arguments: list[str]) -> socket.socket | None:
    """Request an agent from the spawner, with these command-line arguments and this process's
    environment, folder and output. Returns the connection for the reply; None without a spawner.
    """
    descriptor = os.environ.pop(SPAWNER, None)
    if descriptor is None:
        return None
    ours, theirs = socket.socketpair()
    request = {
        "arguments": arguments,
        "environment": {**os.environ, STARTED_AT: repr(time.monotonic())},
        "directory": str(Path.cwd()),
    }
    try:
        with socket.socket(fileno=int(descriptor)) as spawner, theirs:
            socket.send_fds(spawner, [b"fork"], [theirs.fileno(), 1, 2])
        ours.sendall(encode_json(request).encode() + b"\n")
    except OSError:
        ours.close()
        return None
    return ours


def main() -> NoReturn:
    """Run the agent of this command line until it exits."""
    connection = request_agent(sys.argv[1:])
    code = Shim(connection).wait() if connection is not None else None
    if code is None:
        command = [sys.executable, "-m", "kdist_trainer", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606 - no shell is meant
    if code < 0:
        with suppress(OSError):  # the handling of SIGKILL cannot be changed
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()

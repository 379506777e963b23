"""Hosts torch's TCPStore for the agent that started this process: `python -m
kdist_trainer.rendezvous.store_process HOST PORT DESCRIPTOR`, with the socket that listens.

Whoever reaches the store may use up its descriptors, its memory and its processor, which are then
not the agent's. The process ends with its agent, which holds the other end of its standard input.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

_started: list[subprocess.Popen[bytes]] = []
"""The processes of this agent, whose standard input closes with it."""


def start(host: str, port: int, descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process.

    Args:
        host: The address at which it can be reached.
        port: Its port.
        descriptor: The socket that listens there; the caller closes its own.

    Raises:
        OSError: If no process can be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, host, str(port), str(descriptor)],
        stdin=subprocess.PIPE,
        pass_fds=[descriptor],
    )
    _started.append(process)
    return process


def pids() -> set[int]:
    """The processes that this one has started."""
    return {process.pid for process in _started}


def main(host: str, port: str, descriptor: str) -> None:
    """Serve until the agent has ended. A request to stop is for the agent, whose peers may need
    the store until then.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    from kdist_trainer.torch_internals import TCPStore  # takes seconds

    store = TCPStore(
        host, int(port), is_master=True, wait_for_workers=False, master_listen_fd=int(descriptor)
    )
    sys.stdin.buffer.read()
    del store
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

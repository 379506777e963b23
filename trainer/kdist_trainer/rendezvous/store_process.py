"""Hosts torch's TCPStore for the agent that started this process: `python -m
kdist_trainer.rendezvous.store_process HOST PORT DESCRIPTOR`, the last being a listening socket.

A client can exhaust the store's descriptors, memory and CPU time; the agent's are separate. The
process ends with its agent, which holds the other end of its standard input.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

_started: list[subprocess.Popen[bytes]] = []
"""Kept, since each process ends when its standard input is closed."""


def start(host: str, port: int, descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process, which can be reached at this host and port; the caller closes its own
    descriptor of the socket that listens there. Raises `OSError` if no process can be started.
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
    """Serve until the agent has ended. Signals to stop are ignored: they are meant for the agent,
    whose peers may need the store until it ends.
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

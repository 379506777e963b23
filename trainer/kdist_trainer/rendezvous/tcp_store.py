"""The store of an agent: torch's TCPStore, hosted by the agent that the address names, for jobs
that cannot have a Role.

It listens at the agent's own address, in a process of its own, which a flood of connections may use
up without harm to the agent. It has no bounds and authenticates nobody: agents that join later are
newcomers. If the agent that hosts it is lost, so is the store: the other agents exit, and the job
resumes when all are restarted.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from kdist_trainer.hosted_store import listen
from kdist_trainer.rendezvous import store_process
from kdist_trainer.torch_internals import TCPStore

_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_RELEASED = "kdist/released"


def open_tcp_store(
    host: str,
    port: int,
    *,
    node: str,
    address: str | None,
    timeout_seconds: float,
    retry_seconds: float,
) -> tuple[Store, bool]:
    """Open the store at `host`:`port`; this agent hosts it if `host` is its own.

    Args:
        host: The host of the endpoint.
        port: Its port.
        node: The name of this node.
        address: The address at which this node's ranks listen; None means the host's name.
        timeout_seconds: How long the store's own operations wait.
        retry_seconds: How long to wait for the store.

    Returns:
        The store, and whether this agent hosts it.

    Raises:
        DistStoreError: If the store did not respond in time.
        OSError: If it was unreachable all the time.
    """
    deadline = time.monotonic() + retry_seconds
    is_host = False
    while True:
        try:
            if not is_host and is_own_host(host, node=node, address=address):
                is_host = _host(address or host, port)
            where = (address or host) if is_host else host
            # The host may not resolve yet and the port may be closed; torch itself would wait in
            # silence, or not at all.
            socket.create_connection((where, port), _CONNECT_SECONDS).close()
            return _open(where, port, timeout_seconds), is_host
        except (OSError, DistError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def release_store(store: Store, *, is_host: bool, agents: int, seconds: float) -> None:
    """Record that this agent no longer needs the store.

    Args:
        store: The store.
        is_host: Whether this agent hosts it; then it waits for the others.
        agents: The number of agents that release the store.
        seconds: How long the host waits at most.
    """
    deadline = time.monotonic() + seconds
    with suppress(DistError):
        released = store.add(_RELEASED, 1)
        while is_host and released < agents and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            released = store.add(_RELEASED, 0)


def is_own_host(host: str, *, node: str, address: str | None) -> bool:
    """Whether `host` is this agent's: by its first label, or by the address that it resolves to."""
    if host.partition(".")[0] in (socket.gethostname().partition(".")[0], node):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found & ({address} if address else {"127.0.0.1", "::1"}))


def _host(host: str, port: int) -> bool:
    """Host the store; False if the port is in use: by another agent on this host, or by a
    predecessor that is about to exit. Raises `OSError` if no process can be started.
    """
    try:
        listener = listen(host, port)
    except DistError:
        return False
    with listener:
        store_process.start(host, port, listener.fileno())
    return True


def _open(host: str, port: int, timeout_seconds: float) -> Store:
    return TCPStore(
        host,
        port,
        is_master=False,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
    )

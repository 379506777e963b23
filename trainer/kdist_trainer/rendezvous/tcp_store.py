"""The store in an agent: torch's TCPStore, hosted by the agent that the address names, for jobs
that cannot have a Role.

If that agent is lost, so is the store: the other agents exit, and the job resumes when all are
restarted.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

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
    while True:
        try:
            if is_own_host(host, node=node, address=address):
                try:
                    return _open(address or "localhost", port, timeout_seconds, is_host=True), True
                except DistError:
                    # the port is in use: by another agent on this host, or by a predecessor that
                    # is about to exit
                    socket.create_connection((address or host, port), _CONNECT_SECONDS).close()
            # The host may not resolve yet and the port may be closed; torch itself would wait in
            # silence, or not at all.
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            return _open(host, port, timeout_seconds, is_host=False), False
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


def _open(host: str, port: int, timeout_seconds: float, *, is_host: bool) -> Store:
    return TCPStore(
        host,
        port,
        is_master=is_host,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=False,
    )

"""The store in an agent: torch's TCPStore, kept by the agent that the address names, for jobs that
may not have a Role.

With that agent the store is lost: the others end, to be started again and to resume.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

_PAUSE_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_GONE = "kdist/gone"


def open_tcp_store(
    host: str,
    port: int,
    *,
    node: str,
    address: str | None,
    timeout_seconds: float,
    patience_seconds: float,
) -> tuple[Store, bool]:
    """The store at `host`:`port`, which this agent keeps if `host` means it; waits until it is
    there. Also whether it does.

    The store's own operations wait for `timeout_seconds`. Raises `DistStoreError` or `OSError`
    after `patience_seconds`.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            if names_us(host, node=node, address=address):
                try:
                    return _open(address or "localhost", port, timeout_seconds, keep=True), True
                except DistError:
                    # the port is taken: by another agent on this host, or by the one before us,
                    # which is ending
                    socket.create_connection((address or host, port), _CONNECT_SECONDS).close()
            # A name may be unknown yet and a port still closed; torch itself would wait in silence,
            # or not at all.
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            return _open(host, port, timeout_seconds, keep=False), False
        except (OSError, DistError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def release_store(store: Store, *, keeps: bool, agents: int, seconds: float) -> None:
    """Say that this agent needs the store no more; the one that `keeps` it waits at most so long
    until all `agents` have.
    """
    deadline = time.monotonic() + seconds
    with suppress(DistError):
        gone = store.add(_GONE, 1)
        while keeps and gone < agents and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            gone = store.add(_GONE, 0)


def names_us(host: str, *, node: str, address: str | None) -> bool:
    """Whether `host` means this agent: by its first label, or by the address that it resolves
    to.
    """
    if host.partition(".")[0] in (socket.gethostname().partition(".")[0], node):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found & ({address} if address else {"127.0.0.1", "::1"}))


def _open(host: str, port: int, timeout_seconds: float, *, keep: bool) -> Store:
    return TCPStore(
        host,
        port,
        is_master=keep,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        multi_tenant=False,
    )

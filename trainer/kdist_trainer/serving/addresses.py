"""Where a process listens: at the addresses that are needed, and nowhere else."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

LOOPBACK: Final = ("127.0.0.1", "::1")
_BACKLOG: Final = 1024
_ATTEMPTS: Final = 20
_ABSENT: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


def own_addresses(text: str | None) -> tuple[str, ...]:
    """The addresses at which others reach this process.

    Args:
        text: Addresses or names, separated by commas; without any, this host's name is resolved.

    Raises:
        OSError: A name cannot be resolved.
    """
    names = [part for part in (text or "").split(",") if part] or [socket.getfqdn()]
    return tuple(dict.fromkeys(address for name in names for address in _resolve(name)))


def with_loopback(addresses: Sequence[str]) -> tuple[str, ...]:
    """These addresses and loopback in both families: port-forwarding reaches a pod from there."""
    return tuple(dict.fromkeys((*addresses, *LOOPBACK)))


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen at all these addresses, at the same port.

    Args:
        addresses: IPv4 and IPv6 addresses. One of loopback that this host does not have, such as
            `::1` without IPv6, is left out.
        port: 0 picks a port that is free at all of them.

    Raises:
        OSError: If the port is in use, or an address is not of this host.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _listen(addresses, port)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError  # the last attempt returns or raises


def _listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as opened:
        found: list[socket.socket] = []
        for address in addresses:
            is_v6 = ":" in address
            try:
                listener = socket.create_server(
                    (address, found[0].getsockname()[1] if found else port),
                    family=socket.AF_INET6 if is_v6 else socket.AF_INET,
                    backlog=_BACKLOG,
                )
            except OSError as error:
                if error.errno in _ABSENT and address in LOOPBACK and len(addresses) > 1:
                    continue
                raise
            found.append(opened.enter_context(listener))
        if not found:
            raise OSError(errno.EADDRNOTAVAIL, f"this host has none of {', '.join(addresses)}")
        opened.pop_all()
    return found


def _resolve(name: str) -> list[str]:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return [name]
    return [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]

"""Picks the port at which rank 0 of a process group listens, outside the kernel's ephemeral range.

torch takes an ephemeral port. Until rank 0 listens there, seconds later, the kernel may assign it
to any connection of this host; it assigns no ports below that range.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from torch.distributed.elastic.utils.distributed import get_free_port

_FIRST, _LAST = 10_000, 32_767
_MIN_CHOICE = 1000
_ATTEMPTS = 50
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()


def pick_port() -> int:
    """A free port of this host, below the kernel's ephemeral range if that leaves enough ports."""
    last = min(_LAST, _first_ephemeral() - 1)
    for _ in range(_ATTEMPTS if last - _FIRST >= _MIN_CHOICE else 0):
        port = _random.randint(_FIRST, last)
        if _is_free(port):
            return port
    return int(get_free_port())  # type: ignore[no-untyped-call]


def _first_ephemeral() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1  # on other systems, such as macOS, the range begins above


def _is_free(port: int) -> bool:
    """Whether a server can listen at the port on all addresses of this host."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", port))
                server.listen()
                return True
        except OSError as error:
            # otherwise the host has no IPv6
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return False

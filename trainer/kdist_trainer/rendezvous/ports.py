"""The port at which a group's first rank will listen: one that no connection takes meanwhile by
accident.

torch takes a port that the kernel gives away. Until the rank listens there, seconds later, the
kernel may give it to any connection of this host; of ports below that range it gives none.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from torch.distributed.elastic.utils.distributed import get_free_port

_FIRST, _LAST = 10_000, 32_767
_FEW = 1000
_ATTEMPTS = 50
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()


def pick_port() -> int:
    """A free port of this host, outside of what the kernel gives away wherever that leaves enough
    of them.
    """
    last = min(_LAST, _first_given_away() - 1)
    for _ in range(_ATTEMPTS if last - _FIRST >= _FEW else 0):
        port = _random.randint(_FIRST, last)
        if _is_free(port):
            return port
    return int(get_free_port())  # type: ignore[no-untyped-call]


def _first_given_away() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1  # where the system does not say, as on macOS, it begins above


def _is_free(port: int) -> bool:
    """Whether a server could listen there, on any address of this host."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", port))
                server.listen()
                return True
        except OSError as error:
            # else the host does not speak IPv6
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return False

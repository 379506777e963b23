"""Where processes listen, and who gets in there: what tests of listeners share. Linux only."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""The loopback's addresses as /proc writes them."""
SHORT = 0.5
_LISTENS = "0A"


class Listener(NamedTuple):
    """A socket that listens, with its address as /proc writes it."""

    pid: int
    address: str
    port: int


def listeners(pids: Iterable[int]) -> set[Listener]:
    """The sockets at which these processes listen; a process that has ended has none."""
    found = set()
    for pid in pids:
        sockets, lines = set(), []
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    sockets.add(str(entry.readlink()))
            for table in ("tcp", "tcp6"):
                lines += Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        for line in lines:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == _LISTENS and f"socket:[{words[9]}]" in sockets:
                found.add(Listener(pid, address, int(port, 16)))
    return found


def connect(port: int, source: str = "", *, host: str = "127.0.0.1", seconds: float = SHORT) -> str:
    """How an attempt to connect ends: `connected`, or the name of the error."""
    try:
        with socket.create_connection((host, port), seconds, source_address=(source, 0)):
            return "connected"
    except OSError as error:
        return type(error).__name__


def own_addresses() -> list[str]:
    """Addresses of this machine other than 127.0.0.1."""
    found = {"127.0.0.2", "::1"}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("192.0.2.1", 9))  # sends nothing
        found.add(route.getsockname()[0])
    return sorted(found)

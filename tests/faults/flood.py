"""Floods ports of this machine until it is killed, as a stranger in their network could.

    python -m tests.faults.flood SEED ADDRESS:PORT…

It holds thousands of connections and sends drawn nonsense on them: nothing, half a line, lines of
3 MiB, random bytes, requests that nobody understands.
"""

from __future__ import annotations

import random
import resource
import selectors
import socket
import sys
import time
from collections import deque
from contextlib import suppress

MOST = 10_000
"""Connections that are tried to be held at once."""
_BURST = 200
_LONG = b"x" * (3 << 20)
_HALVES = (b"GET /metr", b"kdist-exchange-1 0123", b'{"token": "', b"POST / HTTP/1.1\r\nA:")


def payload(draw: random.Random) -> bytes:
    """What one connection sends; of an idle one nothing."""
    kind = draw.randrange(5)
    if kind == 0:
        return b""
    if kind == 1:
        return draw.choice(_HALVES)
    if kind == 2:
        return _LONG
    if kind == 3:
        return draw.randbytes(draw.randrange(1, 4096)) + b"\n" * draw.randrange(3)
    return b"GET /" + bytes([draw.randrange(33, 127)]) * draw.randrange(9000) + b" HTTP/1.1\r\n\r\n"


def flood(targets: list[tuple[str, int]], draw: random.Random) -> None:
    """Connect and send without end; the oldest connections are given up for new ones."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = min(MOST, hard - 100)
    held: deque[socket.socket] = deque()
    waiting: dict[socket.socket, memoryview] = {}
    selector = selectors.DefaultSelector()

    def give_up(connection: socket.socket) -> None:
        if waiting.pop(connection, None) is not None:
            selector.unregister(connection)
        connection.close()

    while True:
        for _ in range(_BURST):
            connection = socket.socket(
                socket.AF_INET6 if ":" in (target := draw.choice(targets))[0] else socket.AF_INET
            )
            connection.setblocking(False)
            with suppress(OSError):
                connection.connect_ex(target)
            held.append(connection)
            if data := payload(draw):
                waiting[connection] = memoryview(data)
                selector.register(connection, selectors.EVENT_WRITE)
            if len(held) > most:
                give_up(held.popleft())
        for key, _ in selector.select(0.02):
            sender = key.fileobj
            assert isinstance(sender, socket.socket)
            try:
                waiting[sender] = waiting[sender][sender.send(waiting[sender]) :]
            except BlockingIOError:
                continue
            except OSError:
                waiting[sender] = memoryview(b"")
            if not waiting[sender]:
                del waiting[sender]
                selector.unregister(sender)
        time.sleep(0.01)  # the machine is shared with what is flooded


if __name__ == "__main__":
    seed, *words = sys.argv[1:]
    flood(
        [(word.rpartition(":")[0], int(word.rpartition(":")[2])) for word in words],
        random.Random(seed),
    )

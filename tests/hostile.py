"""Servers that no client may trust: they answer a byte a second, never, with too much, with
redirects, or with nonsense. Each is a listener of its own on this machine.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

Connection = socket.socket
Closed = threading.Event
Behaviour = Callable[[Connection, Closed], None]
DRIP_SECONDS: Final = 0.05
"""Between two bytes of a dripping server: far less than any time-out of a single read."""
LIFE_SECONDS: Final = 60.0
"""After which a server gives up a client that does not: its test fails instead of hanging."""
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


_MUCH = b'{"state": "running", "ranks": [' + b"[]," * ((4 << 20) // 3) + b"[]]}"


def read_request(connection: socket.socket) -> None:
    """Read the headers of a request. Raises `OSError` if the client leaves."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            raise ConnectionError("the client left")
        data += chunk


def _drip(connection: socket.socket, data: bytes, closed: threading.Event) -> None:
    for byte in data[: round(LIFE_SECONDS / DRIP_SECONDS)]:
        connection.sendall(bytes([byte]))
        if closed.wait(DRIP_SECONDS):
            return


def drip_headers(connection: socket.socket, closed: threading.Event) -> None:
    """An answer that is sent byte by byte, from its first line on."""
    read_request(connection)
    _drip(connection, b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 100_000, closed)


def drip_body(connection: socket.socket, closed: threading.Event) -> None:
    """An answer whose body is sent byte by byte."""
    read_request(connection)
    connection.sendall(_HEAD % 1_000_000)
    _drip(connection, b'{"state": "running", "job": "' + b"x" * 1_000_000, closed)


def drip_before_reading(connection: socket.socket, closed: threading.Event) -> None:
    """An answer that is sent byte by byte, for no request."""
    _drip(connection, b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 100_000, closed)


def stay_silent(connection: socket.socket, closed: threading.Event) -> None:
    """A request that is read, and not answered."""
    read_request(connection)
    closed.wait(LIFE_SECONDS)


def send_much(connection: socket.socket, closed: threading.Event) -> None:
    """4 MiB of JSON that takes a hundred when it is parsed."""
    read_request(connection)
    connection.sendall(_HEAD % len(_MUCH))
    connection.sendall(_MUCH)


def send_without_end(connection: socket.socket, closed: threading.Event) -> None:
    """A body that says no length and never ends."""
    read_request(connection)
    connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"state": "running"')
    while not closed.is_set():
        connection.sendall(b" " * 65536)


def send_headers_without_end(connection: socket.socket, closed: threading.Event) -> None:
    """Long headers, one after the other."""
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not closed.is_set():
        connection.sendall(b"X-Long: " + b"x" * 60_000 + b"\r\n")


def nest_deeply(connection: socket.socket, closed: threading.Event) -> None:
    """JSON that is nested more deeply than a parser likes."""
    read_request(connection)
    body = b'{"state": ' + b"[" * 100_000
    connection.sendall(_HEAD % len(body) + body)


def talk_nonsense(connection: socket.socket, closed: threading.Event) -> None:
    """No HTTP, but control characters."""
    read_request(connection)
    connection.sendall(b"\x1b]0;owned\x07\x1b[2J\r\nok\r\n\r\n" * 10)


def answer(body: bytes) -> Behaviour:
    """An answer like any other, with this body."""

    def behave(connection: socket.socket, closed: threading.Event) -> None:
        read_request(connection)
        connection.sendall(_HEAD % len(body))
        connection.sendall(body)

    return behave


def redirect_to(port: int, host: str = "127.0.0.1") -> Behaviour:
    """A redirect to another server."""

    def behave(connection: socket.socket, closed: threading.Event) -> None:
        read_request(connection)
        connection.sendall(
            b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n"
            b"Location: http://%s:%d/status\r\n\r\n" % (host.encode(), port)
        )

    return behave


BEHAVIOURS: Final = (
    drip_headers,
    drip_body,
    drip_before_reading,
    stay_silent,
    send_much,
    send_without_end,
    send_headers_without_end,
    nest_deeply,
    talk_nonsense,
)


class HostileServer:
    """A listener on this machine that treats every connection alike, with `tls` over TLS.

    Attributes:
        port: of the listener.
        connections: how many have come.
    """

    def __init__(self, behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> None:
        self._behaviour = behaviour
        self._tls = tls
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._closed.is_set():
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            self._behaviour(connection, self._closed)

    def close(self) -> None:
        """Stop, and let every connection end."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def serve(behaviour: Behaviour, *, tls: ssl.SSLContext | None = None) -> Iterator[HostileServer]:
    """A server that behaves so until the block ends."""
    server = HostileServer(behaviour, tls)
    try:
        yield server
    finally:
        server.close()

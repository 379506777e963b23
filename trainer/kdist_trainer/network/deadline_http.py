"""HTTP connections whose time-out is for a whole answer and not for each read of it: a peer that
sends a byte a second is given up as early as one that is silent.

The standard library and urllib3 set a socket's time-out before they connect, and before they read
an answer, and every read of the answer may take that long. `PlainSocket` and `TlsSocket` take the
time-out as the time for all that follows, until another one is set. A `Pace` is for answers that
have no end or no bound: so many bytes have to come in each of its intervals.
"""

from __future__ import annotations

import http.client
import math
import socket
import ssl
import time
from typing import Any, Final

_MAX_SECONDS: Final = 3600.0 * 24


class Pace(float):
    """Seconds within which `each` bytes have to come, again and again."""

    each: int

    def __new__(cls, seconds: float, *, each: int = 1) -> Pace:
        """Make one: silence for `seconds` is too long, and so are fewer bytes than `each`."""
        made = super().__new__(cls, seconds)
        made.each = each
        return made


class TooLargeError(OSError):
    """The peer sends more than it may."""


class _Deadline(socket.socket):
    """Adds a deadline, and a bound on the bytes that are read, to a kind of sockets."""

    _seconds: float | None = None
    _end = math.inf
    _missing = math.inf
    _left = math.inf

    def settimeout(self, value: float | None) -> None:
        """The time for all that follows; a `Pace` for a rate, None for no limit."""
        self._seconds = value
        self._missing = value.each if isinstance(value, Pace) else math.inf
        self._end = time.monotonic() + value if value else math.inf
        super().settimeout(None if value is None else min(value, _MAX_SECONDS))

    def allow(self, count: float) -> None:
        """Accept only so many bytes from now on, those of headers included; infinity for all."""
        self._left = count

    def _begin(self) -> None:
        if self._end is math.inf:
            return
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        super().settimeout(min(left, _MAX_SECONDS))

    def _passed(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TooLargeError("the answer is too large")
        self._missing -= count
        if self._missing <= 0:
            self.settimeout(self._seconds)

    def recv_into(self, buffer: Any, nbytes: int | None = 0, flags: int = 0) -> int:
        """See `socket.recv_into`."""
        self._begin()
        count = super().recv_into(buffer, nbytes or 0, flags)
        self._passed(count)
        return count

    def recv(self, bufsize: int = 1024, flags: int = 0) -> bytes:
        """See `socket.recv`."""
        self._begin()
        data = super().recv(bufsize, flags)
        self._passed(len(data))
        return data

    def send(self, data: Any, flags: int = 0) -> int:
        """See `socket.send`."""
        self._begin()
        return super().send(data, flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """See `socket.sendall`."""
        self._begin()
        super().sendall(data, flags)


class PlainSocket(_Deadline):
    """A TCP socket with a deadline."""


class TlsSocket(_Deadline, ssl.SSLSocket):
    """A TLS socket with a deadline. Made by a context whose `sslsocket_class` it is."""


def guard(sock: socket.socket) -> PlainSocket:
    """The same connection with a deadline, which begins now."""
    seconds = sock.gettimeout()
    made = PlainSocket(sock.family, sock.type, sock.proto, fileno=sock.detach())
    made.settimeout(seconds)
    return made


def guard_tls(context: ssl.SSLContext) -> ssl.SSLContext:
    """Have a context make sockets with a deadline; returns it."""
    context.sslsocket_class = TlsSocket
    return context


def _connect(address: tuple[str, int], timeout: float, *_: object) -> PlainSocket:
    """Connect to the first address of a host that answers, within `timeout` seconds for all of
    them, which are for the answer too. Raises `OSError`.
    """
    end = time.monotonic() + timeout
    failure: OSError | None = None
    for family, kind, proto, _name, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = PlainSocket(family, kind, proto)
        try:
            sock.settimeout(max(0.001, end - time.monotonic()))
            sock.connect(where)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if isinstance(timeout, Pace):
                sock.settimeout(timeout)
        except OSError as error:
            sock.close()
            failure = error
            if end <= time.monotonic():
                break
        else:
            return sock
    raise failure or OSError(f"{address[0]} has no address")


class _Renewable(http.client.HTTPConnection):
    def renew(self) -> None:
        """Begin the time of another request."""
        if self.sock is not None:
            self.sock.settimeout(self.timeout)

    def allow(self, count: int) -> None:
        """Connect, and accept at most so many bytes. Raises `OSError`."""
        if self.sock is None:
            self.connect()
        sock: Any = self.sock  # one of ours
        sock.allow(count)


class DeadlineConnection(_Renewable):
    """A connection by http, whose `timeout` is for a whole request. Call `renew` before another
    request on the same connection.
    """

    def __init__(self, host: str, port: int | None = None, *, timeout: float, **more: Any) -> None:
        super().__init__(host, port, timeout=timeout, **more)
        self._create_connection = _connect


class DeadlineTlsConnection(_Renewable, http.client.HTTPSConnection):
    """A connection by https, otherwise as `DeadlineConnection`."""

    def __init__(
        self,
        host: str,
        port: int | None = None,
        *,
        timeout: float,
        context: ssl.SSLContext | None = None,
        **more: Any,
    ) -> None:
        guarded = guard_tls(context or ssl.create_default_context())
        super().__init__(host, port, timeout=timeout, context=guarded, **more)
        self._create_connection = _connect

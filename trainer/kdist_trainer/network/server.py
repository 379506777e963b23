"""A TCP server whose clients may be anyone: one thread serves all connections, and what each may
use is bounded.

A connection is a stranger's until its session admits it. Strangers have few bytes and few seconds,
and there are at most `Bounds.strangers` of them; of those that are admitted, at most as many as
`Bounds.admitted` says. At a limit the one that is idle for longest is closed, first of the address
that has the most. Everything that is refused is counted by its reason in `BoundedServer.refused`.
A process listens at the addresses that are needed, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import ipaddress
import itertools
import math
import selectors
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kdist_trainer import log
from kdist_trainer.processes import descriptors
from kdist_trainer.processes.threads import OnError, start_thread

STRANGERS: Final = 128
SECONDS: Final = 5.0
_JOINED_BYTES: Final = 1 << 16


class Refused(StrEnum):
    """Why a connection was closed."""

    LIMIT = "limit"
    """There were too many."""
    RESOURCES = "resources"
    """The process had no file descriptor or memory left."""
    TIMEOUT = "timeout"
    """It took too long to send a request, or to read a response."""
    OVERSIZED = "oversized"
    """It sent too many bytes."""
    TOKEN = "token"  # noqa: S105 - a reason, not a token
    """It had no token, or a wrong one."""
    MALFORMED = "malformed"
    """It had a token and sent what is no request."""


@dataclass(frozen=True)
class Bounds:
    """What connections may use.

    Attributes:
        opening_bytes: The most bytes of a stranger's message.
        message_bytes: The most bytes of a message once it is admitted.
        strangers: The most connections that are not admitted.
        admitted: Returns the most connections that are.
        seconds: How long a stranger may take to send its message, and to read the response; and
            how long any connection may read nothing of a response.
    """

    opening_bytes: int
    message_bytes: int = 0
    strangers: int = STRANGERS
    admitted: Callable[[], int] = lambda: 0
    seconds: float = SECONDS


class Session(ABC):
    """What a protocol keeps of one connection. The server's thread calls it, and it never waits."""

    @abstractmethod
    def receive(self, data: bytearray) -> None:
        """Consume complete messages from the front of `data`; raises `ValueError` for others."""

    def exceed(self) -> None:  # noqa: B027 - few protocols answer that
        """The connection has sent a message that is too long, and will be closed."""

    def end(self) -> None:  # noqa: B027 - few protocols keep what must be removed
        """The connection is closed."""


class Connection:
    """One connection. Any thread may send to it and close it."""

    def __init__(self, server: BoundedServer, connection: socket.socket, peer: str) -> None:
        now = time.monotonic()
        self.peer = peer
        self.is_admitted = False
        self.is_waiting = False
        """Whether the client waits for something that others do: then it is not idle."""
        self.limit = server.bounds.opening_bytes
        self.active_at = now
        self.deadline = now + server.bounds.seconds
        self.session: Session
        self.input = bytearray()
        self.is_open = True
        self.socket = connection
        self._server = server
        self._output: deque[memoryview] = deque()
        self._is_finishing = False
        self._lock = threading.RLock()

    @property
    def has_output(self) -> bool:
        return bool(self._output)

    def admit(self) -> None:
        """Count the connection among those that are admitted: it has shown that it may use the
        server. For sessions only.
        """
        self.is_admitted = True
        self.limit = self._server.bounds.message_bytes
        self.deadline = math.inf
        self._server.limit_admitted(self)

    def resume(self) -> None:
        """Process what has arrived while the client waited."""
        self.is_waiting = False
        self._server.process(self)

    def send(self, *parts: bytes) -> None:
        """Send these parts, as far as the client reads; the rest is sent when it does. Large ones
        are not copied, so that many clients share them.
        """
        if sum(map(len, parts)) <= _JOINED_BYTES:
            parts = (b"".join(parts),)
        with self._lock:
            if not self.is_open or self._is_finishing:
                return
            had_output = self.has_output
            self._output.extend(memoryview(part) for part in parts if part)
            if not had_output and not self._flush():
                self.deadline = time.monotonic() + self._server.bounds.seconds
                self._server.call(lambda: self._server.watch(self))

    def offer(self, part: bytes) -> None:
        """Send `part`, unless the client has not read what was sent before."""
        with self._lock:
            if not self.has_output:
                self.send(part)

    def finish(self) -> None:
        """Close the connection once the client has read everything."""
        with self._lock:
            self._is_finishing = True
            if not self.has_output:
                self.close()

    def close(self) -> None:
        self._server.call(lambda: self._server.drop(self))

    def end(self) -> None:
        """Close the socket. For the server's thread."""
        with self._lock:
            self.is_open = False
            self._output.clear()
            self.socket.close()
        self.session.end()

    def flush(self) -> None:
        """Send what waits; called when the client reads."""
        with self._lock:
            if self._flush():
                self.deadline = math.inf if self.is_admitted else self.deadline
                self._server.watch(self)
                if self._is_finishing:
                    self.close()
            elif self.is_admitted:
                self.deadline = time.monotonic() + self._server.bounds.seconds

    def _flush(self) -> bool:
        """Send as much as the client reads; returns whether that was all. Holds the lock."""
        try:
            while self._output:
                part = self._output[0]
                sent = self.socket.send(part)
                self.active_at = time.monotonic()
                if sent == len(part):
                    self._output.popleft()
                else:
                    self._output[0] = part[sent:]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the client is gone
            self._output.clear()
            self.close()
        return True


LOOPBACK: Final = ("127.0.0.1", "::1")
_BACKLOG: Final = 1024
_ATTEMPTS: Final = 20
_ABSENT: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


def own_addresses(text: str | None) -> tuple[str, ...]:
    """The addresses at which others reach this process: those of the addresses or names in `text`,
    separated by commas; without any, this host's name is resolved. Raises `OSError`.
    """
    found: list[str] = []
    for name in [part for part in (text or "").split(",") if part] or [socket.getfqdn()]:
        try:
            ipaddress.ip_address(name)
            found.append(name)
        except ValueError:
            addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found += [str(info[4][0]) for info in addresses]
    return tuple(dict.fromkeys(found))


def with_loopback(addresses: Sequence[str]) -> tuple[str, ...]:
    """These addresses and loopback in both families: port-forwarding reaches a pod from there."""
    return tuple(dict.fromkeys((*addresses, *LOOPBACK)))


def listen(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Listen at all these addresses, at the same port; 0 picks one that is free at all of them. An
    address of loopback that this host does not have, such as `::1` without IPv6, is left out.
    Raises `OSError` if the port is in use, or an address is not of this host.
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


_READ_BYTES: Final = 1 << 16
_ACCEPTED_AT_ONCE: Final = 32
_SWEEP_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 0.5
"""How long nothing is accepted after an error that would come again at once."""
_WARNING_SECONDS: Final = 60.0
_SHARE: Final = 8
"""Of the descriptors that the process may open, strangers get at most one in so many."""
_MESSAGES: Final = 32
"""The memory for incomplete messages of all connections, in messages of the longest kind."""
_EXHAUSTED: Final = descriptors.EXHAUSTED | {errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}


class BoundedServer:
    """Serves connections at some addresses of this host, from its creation until `close`.

    Attributes:
        port: The port, the same at all addresses.
        refused: The connections that were closed, by reason.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        port: int,
        *,
        bounds: Bounds,
        open_session: Callable[[Connection], Session],
    ) -> None:
        """Start to serve; see `listen`. `name` is that of the server in threads and logs. Raises
        `OSError` if the server cannot listen there, or has no thread.
        """
        self.name = name
        self.bounds = bounds
        self.refused: Counter[str] = Counter({reason.value: 0 for reason in Refused})
        self._open_session = open_session
        self._connections: dict[Connection, None] = {}
        self._actions: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._listens_at = 0.0
        self._warned_at: dict[str, float] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None
        descriptors.reserve()
        with contextlib.ExitStack() as opened:
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._listeners = [opened.enter_context(each) for each in listen(addresses, port)]
            self._wakes, self._waker = map(opened.enter_context, socket.socketpair())
            self.port: int = self._listeners[0].getsockname()[1]
            for each in (*self._listeners, self._wakes, self._waker):
                each.setblocking(False)
            self._selector.register(self._wakes, selectors.EVENT_READ, None)
            self._listen()
            self._opened = opened.pop_all()
        try:
            self._thread = start_thread(self._run, name=f"kdist-{name}", on_error=OnError.RESTART)
        except RuntimeError as error:
            self._opened.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def call(self, action: Callable[[], object]) -> None:
        """Schedule `action` on the server's thread."""
        self._actions.append(action)
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # it wakes already, or is closed
                self._waker.send(b"\0")

    def call_later(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule `action` on the server's thread after that time."""
        timer = (time.monotonic() + seconds, next(self._numbers), action)
        self.call(lambda: heapq.heappush(self._timers, timer))

    def close(self) -> None:
        self.call(self._stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def refuse(self, connection: Connection, reason: Refused) -> None:
        if connection.is_open:
            self._count(reason, connection.peer)
            self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection. For the server's thread."""
        if self._connections.pop(connection, self) is self:
            return
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection.socket)
        connection.end()

    def watch(self, connection: Connection) -> None:
        """Watch for what a connection waits for. For the server's thread."""
        if connection.is_open:
            # a client that does not read may not ask for more
            events = selectors.EVENT_WRITE if connection.has_output else selectors.EVENT_READ
            self._selector.modify(connection.socket, events, connection)

    def limit_admitted(self, newest: Connection) -> None:
        """Close the idlest of the admitted connections if there are too many of them."""
        admitted = [each for each in self._connections if each.is_admitted]
        if len(admitted) > max(1, self.bounds.admitted()):
            self._close_idlest([each for each in admitted if each is not newest] or [newest])

    def _run(self) -> None:
        sweep_at = 0.0
        while not self._is_closed:
            for key, events in self._selector.select(self._seconds_to_wait()):
                self._serve(key, events)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            if (now := time.monotonic()) >= sweep_at:
                for connection in [each for each in self._connections if each.deadline < now]:
                    self.refuse(connection, Refused.TIMEOUT)
                if self._listens_at and now >= self._listens_at:
                    self._listen()
                sweep_at = time.monotonic() + _SWEEP_SECONDS
            while self._actions:
                self._actions.popleft()()
        with self._opened:
            for connection in list(self._connections):
                self.drop(connection)

    def _stop(self) -> None:
        self._is_closed = True

    def _seconds_to_wait(self) -> float | None:
        if self._actions:
            return 0.0
        found = [self._timers[0][0] - time.monotonic()] if self._timers else []
        if self._connections or self._listens_at:
            found.append(_SWEEP_SECONDS)
        return max(0.0, min(found)) if found else None

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                while self._wakes.recv(_READ_BYTES):
                    pass
        elif isinstance(key.data, Connection):
            try:
                if events & selectors.EVENT_WRITE:
                    key.data.flush()
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            except Exception as error:  # noqa: BLE001 - what one client sends must not end the others
                self._fail(key.data, error)
        else:
            self._accept(key.data)

    def _fail(self, connection: Connection, error: Exception) -> None:
        """Close a connection that has shown a fault of this program."""
        if isinstance(error, MemoryError):
            self.refuse(connection, Refused.RESOURCES)
            return
        self.drop(connection)
        self._warn(
            "connection-failed",
            server=self.name,
            peer=connection.peer,
            traceback=traceback.format_exception(error)[-3:],
            message=f"a connection to the server {self.name} is closed after an error: {error!r}",
        )

    def _listen(self) -> None:
        self._listens_at = 0.0
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    continue  # this client is gone
                self._refuse_next(listener)
                return
            self._admit_stranger(accepted, str(address[0]))

    def _refuse_next(self, listener: socket.socket) -> None:
        """Close the next connection with a descriptor from the reserve: left in the queue, it would
        be reported without end.
        """
        try:
            accepted, address = descriptors.spend(listener.accept)
        except OSError:
            self._count(Refused.RESOURCES, "unknown")
            if not self._listens_at:
                for each in self._listeners:
                    self._selector.unregister(each)
            self._listens_at = time.monotonic() + _PAUSE_SECONDS
        else:
            accepted.close()
            self._count(Refused.RESOURCES, str(address[0]))

    def _admit_stranger(self, accepted: socket.socket, peer: str) -> None:
        strangers = [each for each in self._connections if not each.is_admitted]
        most = max(1, min(self.bounds.strangers, descriptors.limit() // _SHARE))
        if len(strangers) >= most:
            self._close_idlest(strangers)
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, accepted, peer)
            connection.session = self._open_session(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        except (OSError, MemoryError):
            accepted.close()
            self._count(Refused.RESOURCES, peer)
            return
        self._connections[connection] = None
        # a client that has sent its request need not wait for its turn
        self._serve(self._selector.get_key(accepted), selectors.EVENT_READ)

    def _close_idlest(self, connections: Sequence[Connection]) -> None:
        by_peer = Counter(each.peer for each in connections)
        self.refuse(
            min(
                connections,
                key=lambda each: (
                    each.has_output or each.is_waiting,
                    -by_peer[each.peer],
                    each.active_at,
                ),
            ),
            Refused.LIMIT,
        )

    def _read(self, connection: Connection) -> None:
        room = connection.limit + 1 - len(connection.input)
        try:
            data = connection.socket.recv(max(1, min(_READ_BYTES, room)))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.drop(connection)
            return
        connection.input += data
        if connection.is_admitted:
            connection.active_at = time.monotonic()
        self.process(connection)

    def process(self, connection: Connection) -> None:
        """Pass what the connection has sent to its session. For the server's thread."""
        try:
            connection.session.receive(connection.input)
        except ValueError:
            reason = Refused.MALFORMED if connection.is_admitted else Refused.TOKEN
            self.refuse(connection, reason)
            return
        if len(connection.input) > connection.limit:
            connection.session.exceed()
            if not connection.has_output:
                self.refuse(connection, Refused.OVERSIZED)
        most = _MESSAGES * max(self.bounds.message_bytes, self.bounds.opening_bytes)
        if len(connection.input) > self.bounds.opening_bytes and (
            sum(len(each.input) for each in self._connections) > most
        ):
            self.refuse(connection, Refused.RESOURCES)

    def _count(self, reason: Refused, peer: str) -> None:
        self.refused[reason.value] += 1
        if reason in (Refused.LIMIT, Refused.RESOURCES):
            self._warn(
                "connections-refused",
                server=self.name,
                reason=reason.value,
                refused=self.refused[reason.value],
                peer=peer,
                message=_MEANINGS[reason].format(self.name, peer),
            )

    def _warn(self, event: str, **fields: object) -> None:
        """Log a warning, at most once a minute."""
        now = time.monotonic()
        if now - self._warned_at.get(event, -_WARNING_SECONDS) >= _WARNING_SECONDS:
            self._warned_at[event] = now
            log.warn(event, **fields)


_MEANINGS: Final = {
    Refused.LIMIT: "the server {} has closed idle connections to make room for others, most "
    "of them from {}",
    Refused.RESOURCES: "the server {} has refused connections, lately one from {}: this process "
    "has no file descriptor or memory left",
}

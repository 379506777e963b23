"""A TCP server whose clients may be anyone: one thread serves all connections, and what each may
use is bounded.

A connection is a stranger's until its session admits it. Strangers have few bytes and few seconds,
and there are at most `Bounds.strangers` of them; of those that are admitted, at most as many as
`Bounds.admitted` says. At a limit the one that is idle for longest is closed, first of the address
that has the most. Everything that is refused is counted by its reason in `BoundedServer.refused`.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import selectors
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from kdist_trainer import descriptors, log
from kdist_trainer.serving.addresses import listen
from kdist_trainer.serving.connection import Bounds, Connection, Refused, Session
from kdist_trainer.threads import OnError, start_thread

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
        """Start to serve.

        Args:
            name: The name of the server in threads and logs.
            addresses: Where to listen; see `addresses.listen`.
            port: The port; 0 picks a free one.
            bounds: What connections may use.
            open_session: Returns the session of a new connection.

        Raises:
            OSError: If the server cannot listen there, or has no thread.
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
        """Have the server's thread call `action` soon."""
        self._actions.append(action)
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # it wakes already, or is closed
                self._waker.send(b"\0")

    def call_later(self, seconds: float, action: Callable[[], object]) -> None:
        """Have the server's thread call `action` after so many seconds."""
        timer = (time.monotonic() + seconds, next(self._numbers), action)
        self.call(lambda: heapq.heappush(self._timers, timer))

    def close(self) -> None:
        """Stop listening and close all connections."""
        self.call(self._stop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def refuse(self, connection: Connection, reason: Refused) -> None:
        """Close a connection for this reason."""
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
            if time.monotonic() >= sweep_at:
                self._sweep()
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

    def _pause(self) -> None:
        """Accept nothing for a while."""
        if not self._listens_at:
            for listener in self._listeners:
                self._selector.unregister(listener)
        self._listens_at = time.monotonic() + _PAUSE_SECONDS

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
            self._pause()
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
        """Have the session take what the connection has sent. For the server's thread."""
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

    def _sweep(self) -> None:
        """Close connections that have taken too long, and listen again after a pause."""
        now = time.monotonic()
        for connection in [each for each in self._connections if each.deadline < now]:
            self.refuse(connection, Refused.TIMEOUT)
        if self._listens_at and now >= self._listens_at:
            self._listen()

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

"""The key-value exchange between the agents of one complete round: a small server in one of them,
and its client in the others.

The agent that completes a round names itself as the host in the very write that commits the
membership, so each round has one host or, if it cannot listen, none: then the agents exchange
through the store of the rendezvous. The next round needs nothing that is kept here: agents that
lose their host form another round, which names another host.

The server is not torch's TCPStore, which has no limits and, in torch 2.13, accepts only a few of
many simultaneous clients every five seconds. The TCPStore's client waits forever for a silent host,
ignores signals meanwhile, and prints a page of C++ frames for each host that has exited.

A client is admitted by a token, derived from the job's exchange key and a nonce of the round. The
nonce is in the rendezvous state, which more people can read. In a cluster the key is in a Secret,
which the kubelet mounts and no role of kdist's can read; with `kdist run` it is in the run's
private folder.

Through the server, a node also asks the gatherer of a round to add it
(`kdist_trainer.rendezvous.many_nodes`): it sends the token and itself, one line each, and waits.
The response is one line, the gatherer's copy of the ConfigMap once the round is complete; then the
connection ends. If it ends without a line, the gatherer adds no more nodes.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any, ClassVar, Self

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from kdist_trainer import log
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.network.server import BoundedServer, Bounds, Connection, Session, own_addresses
from kdist_trainer.rendezvous.membership import (
    INTERVAL_SECONDS,
    LINE_BYTES,
    MEMBER,
    MemberConnections,
)
from kdist_trainer.rendezvous.torch_internals import Node

KEY_FILE = "exchange.key"
"""The name of the mounted file."""
_LEAST_BYTES = 32
TOKEN_DIGITS = 32
_FINGERPRINT_DIGITS = 16


class ExchangeKey:
    """The key of a job's exchanges, which never changes once it was read: a Secret may be mounted
    after the agent has started. `read` returns it; while there is none, it returns nothing or
    raises.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self._value = b""

    def token(self, *fields: object) -> str | None:
        """The token that is derived from these fields; None without a key."""
        return self._digest(("token", *fields), TOKEN_DIGITS)

    def fingerprint(self) -> str | None:
        """Equal for two agents with the same key; None without a key."""
        return self._digest(("fingerprint",), _FINGERPRINT_DIGITS)

    def exists(self) -> bool | None:
        """Whether there is a key."""
        return self.fingerprint() is not None

    def _digest(self, fields: tuple[object, ...], digits: int) -> str | None:
        if not self._value:
            try:
                found = self._read().strip()
            except (OSError, RuntimeError):  # a DistError is one
                return None
            if len(found) < _LEAST_BYTES:  # anybody could guess it
                return None
            self._value = found
        return hmac.digest(self._value, repr(fields).encode(), "sha256").hex()[:digits]


NO_KEY = ExchangeKey(bytes)
"""Derives no token."""


JOIN = "join"
"""The key of a request to join, with the fields of the node."""
_CONNECT_SECONDS = 2.0
_TRANSFER_SECONDS = 5.0
_RESPONSE_BYTES = 1 << 22


class JoinRequests:
    """The requests to join one round, which its gatherer holds until it answers them."""

    def __init__(self) -> None:
        self._connections: dict[Connection, Node] = {}
        self._lock = threading.Lock()
        self._arrived = threading.Event()
        self._response: bytes | None = None

    def hold(self, fields: Sequence[Any], connection: Connection) -> None:
        """Hold the request of a node until it is answered or withdrawn."""
        node = Node(*fields)
        with self._lock:
            self._connections[connection] = node
            self._answer()
        self._arrived.set()

    def withdraw(self, connection: Connection) -> None:
        """Forget the request of a connection that has ended, if it has made one."""
        with self._lock:
            self._connections.pop(connection, None)

    def nodes(self) -> list[Node]:
        """The nodes whose requests are open."""
        with self._lock:
            return list(dict.fromkeys(self._connections.values()))

    def wait(self, seconds: float) -> bool:
        """Wait for a new request; returns whether one has arrived."""
        arrived = self._arrived.wait(seconds)
        self._arrived.clear()
        return arrived

    def end(self, response: bytes = b"") -> None:
        """Answer all requests, including later ones, and end their connections."""
        with self._lock:
            self._response = response
            self._answer()

    def _answer(self) -> None:
        if self._response is not None:
            for connection in self._connections:
                connection.send(self._response)
                connection.finish()
            self._connections = {}


class JoinRequest:
    """The request of `node` to the gatherer `host`. Raises `OSError` if the gatherer cannot be
    reached.
    """

    def __init__(self, host: ExchangeHost, node: Node) -> None:
        self.host = host
        self._socket = socket.create_connection((host.address, host.port), _CONNECT_SECONDS)
        try:
            self._socket.sendall(host.opening + encode_json({JOIN: astuple(node)}).encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> bytes | None:
        """The response; None if there is none within `seconds`. Raises `OSError` if the gatherer is
        gone, or adds no more nodes.
        """
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        if not readable.poll(seconds * 1000):
            return None
        self._socket.settimeout(_TRANSFER_SECONDS)
        with self._socket.makefile("rb") as lines:
            line = lines.readline(_RESPONSE_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the gatherer has ended the connection")
        return line

    def close(self) -> None:
        """Withdraw the request."""
        self._socket.close()


_NONCE_BYTES = 16
_OPENING = b"kdist-exchange-1 "  # of the protocol's first version
_MAX_REQUEST_BYTES = 1 << 22  # a ConfigMap holds at most 1 MiB
MAX_VALUES_BYTES = 1 << 26
"""The most bytes of all values of a round."""
_MAX_SECONDS = 3600.0
_PER_NODE, _SPARE = 2, 16
"""A round's connections: of each node, one for values and one for membership; and spare ones."""
_KEPT = 6  # exchanges of two rounds: each has a host, a gatherer and a second host


@dataclass(frozen=True)
class ExchangeHost:
    """The host of a round's exchange, as the rendezvous state names it.

    Attributes:
        round: The number of the round.
        address: The address of the agent.
        port: Its port.
        token: Admits to the exchange of this round and to no other.
        rank: The group rank of the agent.
        nonce: What the token is derived from, with the job's key; others may read it.
    """

    round: int
    address: str
    port: int
    token: str
    rank: int
    nonce: str = ""

    ATTRIBUTE: ClassVar[str] = "kdist_exchange_host"
    """The name of its attribute in the rendezvous state."""

    @property
    def opening(self) -> bytes:
        """The line by which a client opens its connection."""
        return _OPENING + self.token.encode() + b"\n"

    def name_in(self, state: object) -> None:
        """Put the host into a rendezvous state."""
        vars(state)[self.ATTRIBUTE] = self.public_fields()

    def public_fields(self) -> tuple[int, str, int, str, int]:
        """The host without its token."""
        return self.round, self.address, self.port, self.nonce, self.rank

    @classmethod
    def from_public(cls, fields: Sequence[Any], key: ExchangeKey) -> Self | None:
        """The host with these public fields; None without the key."""
        number, address, port, nonce, rank = fields
        token = key.token(number, address, port, nonce)
        return None if token is None else cls(number, address, port, token, rank, nonce)

    @classmethod
    def is_valid(cls, fields: object) -> bool:
        """Whether these fields of a rendezvous state describe a host, or None for no host."""
        types = [int, str, int, str, int]
        return fields is None or (type(fields) is tuple and [*map(type, fields)] == types)

    @classmethod
    def named_in(cls, state: object, key: ExchangeKey) -> Self | None:
        """The host of the current round of a rendezvous state; None if it has none, or this agent
        has no key.
        """
        fields = vars(state).get(cls.ATTRIBUTE)
        host = None if fields is None else cls.from_public(fields, key)
        return host if host is not None and host.round == vars(state)["round"] else None


class _Wait:
    """A client that waits for keys.

    Attributes:
        keys: The keys.
        answer: Called once, when all keys exist or the time is up.
    """

    def __init__(self, keys: Sequence[str], answer: Callable[[], None]) -> None:
        self.keys = keys
        self.answer = answer
        self.is_over = False

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.answer()


class _Exchange:
    """The values of one exchange, the connections of its members, and requests to join."""

    def __init__(self) -> None:
        self.members = MemberConnections()
        self.join_requests = JoinRequests()
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waits: dict[str, list[_Wait]] = {}

    def set(self, values: dict[str, str]) -> None:
        encoded = {key: encode_json(value).encode() for key, value in values.items()}
        for key, value in encoded.items():
            self._bytes += len(value) - len(self._values.get(key, b""))
            if self._bytes > MAX_VALUES_BYTES:
                raise ValueError("the exchange is full")
            self._values[key] = value
        for wait in [wait for key in encoded for wait in self._waits.pop(key, ())]:
            self.wait(wait)

    def wait(self, wait: _Wait) -> None:
        """End the wait once all of its keys exist."""
        missing = next((key for key in wait.keys if key not in self._values), None)
        if missing is None:
            wait.end()
        elif not wait.is_over:
            # drops those whose client has given up
            others = [each for each in self._waits.get(missing, ()) if not each.is_over]
            self._waits[missing] = [*others, wait]

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """The values as JSON; null for those that are not set."""
        return [self._values.get(key, b"null") for key in keys]


class _Client(Session):
    """One client: its first line has the token, each further one is a request in JSON, to which
    it gets one line of JSON.
    """

    def __init__(self, connection: Connection, server: ExchangeServer) -> None:
        self._connection = connection
        self._server = server
        self._exchange: _Exchange | None = None
        self._rank: int | None = None
        self._wait: _Wait | None = None
        self._searched = 0

    def receive(self, data: bytearray) -> None:
        while not self._connection.is_waiting:
            end = data.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(data)
                return
            line = bytes(data[:end])
            del data[: end + 1]
            self._searched = 0
            try:
                if self._exchange is None:
                    # raises `ValueError` without the token of a recent round
                    self._exchange = self._server.find(line)
                    self._connection.admit()
                elif self._rank is not None:
                    self._exchange.members.take(self._rank, line)
                else:
                    self._serve(self._exchange, parse_json(line))
            except (KeyError, TypeError, RecursionError) as error:
                raise ValueError("not a request") from error

    def end(self) -> None:
        if self._wait is not None:
            self._wait.is_over = True
        if self._exchange is not None:
            self._exchange.join_requests.withdraw(self._connection)
            if self._rank is not None:
                self._exchange.members.disconnect(self._rank, self._connection)

    def _serve(self, exchange: _Exchange, request: dict[str, Any]) -> None:
        if MEMBER in request:
            self._rank = int(request[MEMBER])
            self._connection.limit = LINE_BYTES
            exchange.members.connect(self._rank, self._connection)
        elif JOIN in request:
            self._connection.is_waiting = True
            exchange.join_requests.hold(request[JOIN], self._connection)
        elif "set" in request:
            exchange.set({str(key): str(value) for key, value in request["set"].items()})
            self._connection.send(b"[]\n")
        else:
            self._get(exchange, [str(key) for key in request["get"]], float(request["seconds"]))

    def _get(self, exchange: _Exchange, keys: Sequence[str], seconds: float) -> None:
        def answer() -> None:
            self._wait = None
            values = exchange.values(keys)
            parts = [part for value in values for part in (b",", value)]
            self._connection.send(b"[", *parts[1:], b"]\n")
            self._connection.resume()

        self._wait = wait = _Wait(keys, answer)
        self._connection.is_waiting = True
        exchange.wait(wait)
        if not wait.is_over:
            self._server.call_later(max(0.0, min(seconds, _MAX_SECONDS)), wait.end)


class ExchangeServer:
    """The server that this agent hosts, for all rounds that it completes, at its address and
    nowhere else. It starts with the first of them and ends with the agent. `nodes` returns the most
    nodes of a round.
    """

    def __init__(self, address: str, *, key: ExchangeKey, nodes: Callable[[], int]) -> None:
        self.key = key
        self._address = address
        self._nodes = nodes
        self._most = 0
        self._server: BoundedServer | None = None
        self._exchanges: dict[str, _Exchange] = {}
        self._lock = threading.Lock()

    def offer(self, number: int, rank: int) -> ExchangeHost | None:
        """This agent, with group rank `rank`, as the host of a round; None if it cannot listen, or
        has no key.
        """
        with self._lock:
            if self.key.fingerprint() is None:
                return None
            self._most = _PER_NODE * self._nodes() + _SPARE
            try:
                server = self._server or self._start()
            except OSError as error:
                log.warn(
                    "exchange-not-hosted",
                    message=f"this agent hosts no exchange: it cannot listen at {self._address}: "
                    f"{error}",
                )
                return None
            fields = number, self._address, server.port, secrets.token_hex(_NONCE_BYTES), rank
            if (host := ExchangeHost.from_public(fields, self.key)) is not None:
                recent = dict(list(self._exchanges.items())[1 - _KEPT :])
                self._exchanges = {**recent, host.token: _Exchange()}
            return host

    def _start(self) -> BoundedServer:
        server = BoundedServer(
            "exchange",
            own_addresses(self._address),
            0,
            bounds=Bounds(
                opening_bytes=len(_OPENING) + TOKEN_DIGITS + 1,
                message_bytes=_MAX_REQUEST_BYTES,
                admitted=lambda: self._most,
            ),
            open_session=lambda connection: _Client(connection, self),
        )
        self._server = server
        self._send()
        return server

    def _send(self) -> None:
        """Send all members a line, again in each interval."""
        self.call_later(INTERVAL_SECONDS, self._send)
        for exchange in self._exchanges.values():
            exchange.members.send()

    def call_later(self, seconds: float, action: Callable[[], object]) -> None:
        """Have the server's thread call `action` after `seconds`."""
        if self._server is not None:
            self._server.call_later(seconds, action)

    def refused(self) -> Mapping[str, int]:
        """The connections that were closed, by reason."""
        return {} if self._server is None else self._server.refused

    def find(self, opening: bytes) -> _Exchange:
        """The exchange whose token a client has sent. Raises `ValueError` if there is none."""
        found = None  # no early exit: the time must not depend on which token matches
        for token, exchange in self._exchanges.items():
            if hmac.compare_digest(_OPENING + token.encode(), opening):
                found = exchange
        if found is None:
            raise ValueError("no exchange has this token")
        return found

    def join_requests(self, host: ExchangeHost) -> JoinRequests:
        """The requests to join at `host`, which is this agent."""
        exchange = self._exchanges.get(host.token)
        return JoinRequests() if exchange is None else exchange.join_requests

    def is_host(self, host: ExchangeHost) -> bool:
        """Whether `host` is this agent."""
        return host.token in self._exchanges

    def expect(self, host: ExchangeHost, ranks: Collection[int], seconds: float) -> None:
        """See `MemberConnections.expect`; does nothing if `host` is not this agent."""
        if exchange := self._exchanges.get(host.token):
            exchange.members.expect(ranks, seconds)

    def mark_left(self, host: ExchangeHost) -> None:
        """Tell the members of the round that its host, which is this agent, leaves on purpose."""
        if exchange := self._exchanges.get(host.token):
            exchange.members.mark_left(host.rank)

    def close(self) -> None:
        """Stop listening and close all connections."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


_RESPONSE_SECONDS = 5.0
_CHECK_SECONDS = 0.1
_MAX_RESPONSE_BYTES = MAX_VALUES_BYTES + (1 << 20)


class HostEndedError(DistNetworkError):
    """The process that hosts an exchange has ended: it has closed the connection, or nothing
    listens at its port.
    """


class ExchangeStore(Store):
    """The exchange of one round, as a `torch.distributed.Store` without `add` and removals. Keys
    are str, values str or bytes; `get` returns bytes. `get` and `wait` wait `timeout_seconds` for a
    key.

    All operations, and the first connection, raise `DistNetworkError` if the host does not respond,
    `HostEndedError` if it has ended.
    """

    def __init__(self, host: ExchangeHost, *, timeout_seconds: float) -> None:
        super().__init__()
        self.host = host
        self.while_waiting: Callable[[], None] | None = None
        """Called ten times a second while a key is waited for; an exception ends the wait and
        closes the store.
        """
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_connection((host.address, host.port), _RESPONSE_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(host.opening)
        except OSError as error:
            raise self._lost(error) from error
        self._stream = self._socket.makefile("rb")

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one."""
        return self.multi_get([key])[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all keys to their values."""
        self._request({"set": dict(zip(keys, map(_text, values), strict=True))})

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys; waits until all exist."""
        return self._wait_for(keys, self._timeout_seconds)

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all keys, None for those that do not exist."""
        found = self._request({"get": list(keys), "seconds": 0.0})
        return [None if value is None else value.encode("latin-1") for value in found]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return None not in self.peek(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._wait_for(keys, self._timeout_seconds if timeout is None else timeout.total_seconds())

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()  # the socket stays open until its file is closed
        self._socket.close()

    def _wait_for(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        found = self._request({"get": list(keys), "seconds": seconds}, seconds)
        if missing := [key for key, value in zip(keys, found, strict=True) if value is None]:
            raise DistStoreError(
                f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(missing)}"
            )
        return [str(value).encode("latin-1") for value in found]

    def _request(self, request: dict[str, Any], seconds: float = 0.0) -> list[str | None]:
        line = encode_json(request).encode() + b"\n"
        with self._lock:
            try:
                self._socket.settimeout(seconds + _RESPONSE_SECONDS)
                self._socket.sendall(line)
                self._watch(seconds + _RESPONSE_SECONDS)
                response = self._stream.readline(_MAX_RESPONSE_BYTES)
                found: list[str | None] = parse_json(response)
            except (OSError, ValueError) as error:
                self.close()
                raise self._lost(error) from error
            except BaseException:
                # an exception of a signal handler: the next request would read this response
                self.close()
                raise
        return found

    def _watch(self, seconds: float) -> None:
        """Call `while_waiting`, if it is set, until there is a response, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (
            self.while_waiting is not None
            and time.monotonic() < deadline
            and not connection.wait([self._socket], _CHECK_SECONDS)
        ):
            self.while_waiting()

    def _lost(self, error: Exception) -> DistNetworkError:
        has_ended = isinstance(error, ConnectionError | ValueError)
        reason = error if isinstance(error, OSError) else "the connection was closed"
        return (HostEndedError if has_ended else DistNetworkError)(
            f"the agent at {self.host.address}:{self.host.port}, which hosts the exchange of round "
            f"{self.host.round}, does not respond: {reason}"
        )


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")

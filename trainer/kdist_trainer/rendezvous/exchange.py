"""What the agents of one complete round tell each other, through a small key-value server in one of
them.

The agent that completes a round names itself as the host in the very write that commits the
membership, so each round has one host or, if it cannot listen, none: then the agents exchange
through the store of the rendezvous. Nothing is kept here that the next round needs: agents that
lose their host form another round, which names another host.

The server is not torch's TCPStore. Of many clients that connect to one at the same time, torch
2.13 accepts a few in each five seconds; its client waits for a silent host without end, deaf to
signals, and prints a page of C++ frames for each host that has exited.
"""

from __future__ import annotations

import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from typing import Any, ClassVar, Self

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from kdist_trainer.rendezvous.exchange_key import ExchangeKey
from kdist_trainer.rendezvous.join_requests import JOIN, JoinRequests
from kdist_trainer.rendezvous.membership import INTERVAL_SECONDS, MEMBER, MemberConnections
from kdist_trainer.threads import OnError, start_thread
from kdist_trainer.untrusted_text import parse_json

_RESPONSE_SECONDS = 5.0
_CHECK_SECONDS = 0.1
_NONCE_BYTES = 16
_MAX_REQUEST_BYTES = 1 << 22  # a ConfigMap holds at most 1 MiB
_KEPT = 6  # of two rounds: each has an exchange, one for its gatherer, one for its second host
_LOOPBACK = "127.0.0.1"


class HostEndedError(DistNetworkError):
    """The process that hosts an exchange has ended: it has closed the connection, or nothing
    listens at its port.
    """


@dataclass(frozen=True)
class ExchangeHost:
    """The host of a round's exchange, as the rendezvous state names it.

    Attributes:
        round: The number of the round.
        address: The address of the agent.
        port: Its port.
        token: Admits to the exchange of this round and to no other.
        rank: The group rank of the agent.
        nonce: What the token follows from, with the job's key: others may read it.
    """

    round: int
    address: str
    port: int
    token: str
    rank: int
    nonce: str = ""

    ATTRIBUTE: ClassVar[str] = "kdist_exchange_host"
    """Where the rendezvous state has it."""

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
        """Whether a rendezvous state may have these fields as the host: None is no host."""
        if fields is None:
            return True
        return type(fields) is tuple and [*map(type, fields)] == [int, str, int, str, int]

    @classmethod
    def named_in(cls, state: object, key: ExchangeKey) -> Self | None:
        """The host of the current round of a rendezvous state; None if it has none, or this agent
        has no key.
        """
        fields = vars(state).get(cls.ATTRIBUTE)
        host = None if fields is None else cls.from_public(fields, key)
        return host if host is not None and host.round == vars(state)["round"] else None


class _Exchange:
    """The values of one exchange, the connections of its members, and requests to join."""

    def __init__(self) -> None:
        self.members = MemberConnections()
        self.join_requests = JoinRequests()
        self._values: dict[str, str] = {}
        self._waiters: dict[str, list[threading.Event]] = {}
        self._lock = threading.Lock()

    def set(self, values: dict[str, str]) -> None:
        with self._lock:
            self._values.update(values)
            woken = [event for key in values for event in self._waiters.pop(key, ())]
        for event in woken:
            event.set()

    def get(self, keys: Sequence[str], seconds: float) -> list[str | None]:
        """The values, None for those that nobody has set within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            present = threading.Event()
            with self._lock:
                missing = next((key for key in keys if key not in self._values), None)
                if missing is None or time.monotonic() >= deadline:
                    return [self._values.get(key) for key in keys]
                self._waiters.setdefault(missing, []).append(present)
            present.wait(max(0.0, deadline - time.monotonic()))


class _Handler(socketserver.StreamRequestHandler):
    """Serves one client: a line of JSON for each request and for each response."""

    server: _Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        try:
            while line := self.rfile.readline(_MAX_REQUEST_BYTES):
                request = parse_json(line)
                exchange = self.server.exchanges.get(request["token"])
                if exchange is None:
                    return  # of a round that is long over, or of nobody
                if MEMBER in request:
                    exchange.members.hold(request[MEMBER], self.connection, self.rfile)
                    return
                if JOIN in request:
                    exchange.join_requests.hold(request[JOIN], self.connection)
                    return
                if "set" in request:
                    exchange.set(request["set"])
                    response: list[str | None] = []
                else:
                    response = exchange.get(request["get"], request["seconds"])
                self.wfile.write(json.dumps(response).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            return  # the client is gone, or is none of ours


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, address: str) -> None:
        self.exchanges: dict[str, _Exchange] = {}
        self._sent_at = 0.0
        is_local = address == _LOOPBACK
        if not is_local and socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__((_LOOPBACK if is_local else "", 0), _Handler)

    def service_actions(self) -> None:
        """Called after each request and at least once in each interval."""
        now = time.monotonic()
        if now - self._sent_at >= INTERVAL_SECONDS / 2:
            self._sent_at = now
            for exchange in self.exchanges.values():
                exchange.members.send()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class ExchangeServer:
    """The server that this agent hosts, for all rounds that it completes. It is started for the
    first of them and ends with the agent.

    Args:
        address: The address of the agent.
        key: The key of the job's exchanges.
    """

    def __init__(self, address: str, *, key: ExchangeKey) -> None:
        self.key = key
        self._address = address
        self._server: _Server | None = None
        self._lock = threading.Lock()

    def offer(self, number: int, rank: int) -> ExchangeHost | None:
        """This agent, with group rank `rank`, as the host of a round; None if it cannot listen, or
        has no key.
        """
        with self._lock:
            return self._offer(number, rank)

    def _offer(self, number: int, rank: int) -> ExchangeHost | None:
        if self.key.fingerprint() is None:
            return None
        try:
            server = self._server or _Server(self._address)
        except OSError:
            return None
        if self._server is None:
            self._server = server
            start_thread(
                partial(server.serve_forever, poll_interval=INTERVAL_SECONDS),
                name="kdist-exchange",
                on_error=OnError.RESTART,
            )
        port, nonce = server.server_address[1], secrets.token_hex(_NONCE_BYTES)
        fields = number, self._address, port, nonce, rank
        if (host := ExchangeHost.from_public(fields, self.key)) is not None:
            recent = dict(list(server.exchanges.items())[1 - _KEPT :])
            server.exchanges = {**recent, host.token: _Exchange()}
        return host

    def join_requests(self, host: ExchangeHost) -> JoinRequests:
        """The requests to join at `host`, which is this agent."""
        exchange = None if self._server is None else self._server.exchanges.get(host.token)
        return JoinRequests() if exchange is None else exchange.join_requests

    def is_host(self, host: ExchangeHost) -> bool:
        """Whether `host` is this agent."""
        return self._server is not None and host.token in self._server.exchanges

    def expect(self, host: ExchangeHost, ranks: Collection[int], seconds: float) -> None:
        """See `MemberConnections.expect`; does nothing if `host` is not this agent."""
        if self._server is not None and (exchange := self._server.exchanges.get(host.token)):
            exchange.members.expect(ranks, seconds)

    def mark_left(self, host: ExchangeHost) -> None:
        """Tell the members of the round that its host, which is this agent, leaves on purpose."""
        if self._server is not None and (exchange := self._server.exchanges.get(host.token)):
            exchange.members.mark_left(host.rank)

    def close(self) -> None:
        """Stop listening; connections that are open stay so."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class ExchangeStore(Store):
    """The exchange of one round, as a `torch.distributed.Store` without numbers and removals. Keys
    are str, values str or bytes; `get` returns bytes.

    All operations raise `DistNetworkError` if the host does not respond, `HostEndedError` if it has
    ended.

    Args:
        host: The host of the exchange.
        timeout_seconds: How long `get` and `wait` wait for a key.

    Raises:
        DistNetworkError: If the host cannot be reached.
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

    def has_extended_api(self) -> bool:
        """False: the store has none of torch's optional operations, such as queues."""
        return False

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
        line = json.dumps({"token": self.host.token, **request}).encode() + b"\n"
        with self._lock:
            try:
                self._socket.settimeout(seconds + _RESPONSE_SECONDS)
                self._socket.sendall(line)
                self._watch(seconds + _RESPONSE_SECONDS)
                response = self._stream.readline()
                found: list[str | None] = parse_json(response)
            except (OSError, ValueError) as error:
                self.close()
                raise self._lost(error) from error
            except BaseException:
                # an exception of a signal handler: the response would be that of the next request
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

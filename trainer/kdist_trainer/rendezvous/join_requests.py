"""How a node asks the gatherer of a round to join it; see `kdist_trainer.rendezvous.gathering`.

A node opens with one line, which names the exchange and the node, and waits. It gets one line, the
gatherer's copy of the ConfigMap once the round is complete, and the connection ends. One that ends
without a line says that the gatherer joins nobody any more.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from kdist_trainer.json_text import encode_json
from kdist_trainer.rendezvous.torch_internals import Node

if TYPE_CHECKING:
    from kdist_trainer.rendezvous.exchange import ExchangeHost
    from kdist_trainer.serving.connection import Connection

JOIN = "join"
"""The key of a request to join, with the fields of the node."""
_CONNECT_SECONDS = 2.0
_TRANSFER_SECONDS = 5.0
_RESPONSE_BYTES = 1 << 22


class JoinRequests:
    """The requests of one round, as the gatherer holds them."""

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
        """Forget the request of this connection, if it has made one: it has ended."""
        with self._lock:
            self._connections.pop(connection, None)

    def nodes(self) -> list[Node]:
        """The nodes that ask, without those that have given up."""
        with self._lock:
            return list(dict.fromkeys(self._connections.values()))

    def wait(self, seconds: float) -> bool:
        """Wait for a new request; returns whether one has arrived."""
        arrived = self._arrived.wait(seconds)
        self._arrived.clear()
        return arrived

    def end(self, response: bytes = b"") -> None:
        """Answer all requests, those that are still to come too, and end their connections."""
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
    """The request of one node.

    Args:
        host: The gatherer.
        node: The node.

    Raises:
        OSError: If the gatherer cannot be reached.
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
        """The response; None if there is none within `seconds`.

        Raises:
            OSError: If the gatherer is gone, or joins nobody any more.
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

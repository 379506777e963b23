"""One connection of a server, its session, and the bounds on what it may use."""

from __future__ import annotations

import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kdist_trainer.serving.server import BoundedServer

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
        """Take complete messages off the front of `data`; raises `ValueError` for another one."""

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
        """Whether the client has not read all that was sent."""
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
        """Have the session take what has arrived while the client waited."""
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
        """Close the connection."""
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

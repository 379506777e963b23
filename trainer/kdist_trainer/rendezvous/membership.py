"""Tells the members of a round which of them have died or fallen silent. Each holds a connection to
the host of the round.

However a process ends, the kernel closes its connections. A proxy between two nodes may also close
one; then the member reconnects at once. A node that loses power closes none, but no longer answers:
so the host sends a line in each interval, and members answer each. A member that was lost before it
connected is noticed when it does not connect in time.

A member first sends its group rank, and last an empty line if it leaves on purpose. A line of the
host lists, as JSON, the ranks that are disconnected, those that have left, those that do not answer
with the seconds since, and the second host of the round, once that has announced itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.processes.threads import OnError, start_thread

if TYPE_CHECKING:
    from kdist_trainer.network.server import Connection
    from kdist_trainer.rendezvous.exchange import ExchangeHost

MEMBER = "member"
"""The key of a request that asks for a connection of a member, with its group rank."""
INTERVAL_SECONDS = 0.25
"""How often the host of a round sends a line."""
SILENCE_SECONDS = 1.25
"""The shortest silence after which a member that the others wait for counts as lost."""
DISCONNECTED_SECONDS = 0.5
"""How long a member must be disconnected to count as lost while workers run: a live one reconnects
at once. Once this node has left the round too, a lost connection suffices.
"""
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.1
LINE_BYTES = 4096
"""The most bytes of a line of a member."""
_HOST_LINE_BYTES = 1 << 16
_ANSWER, _GOODBYE = b".", b""
_SILENCE_FACTOR = 2.0
"""A silence counts if it is this many times the longest earlier one: a busy node answers late."""


@dataclass
class _Member:
    """One member's connection, as the host holds it.

    Attributes:
        connection: The connection.
        has_answered: Whether it has answered since the last line was sent.
        silence: The seconds without an answer.
    """

    connection: Connection
    has_answered: bool = True
    silence: float = 0.0


class MemberConnections:
    """The connections of one round's members, as its host holds them."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._disconnected: set[int] = set()
        self._left: set[int] = set()
        self._expected: set[int] = set()
        self._expected_seconds = 0.0
        self._second: list[Any] | None = None
        self._lock = threading.Lock()
        self._sent_at = time.monotonic()

    def expect(self, ranks: Collection[int], seconds: float) -> None:
        """Wait `seconds` for the members with these group ranks to connect: after that, those that
        have not count as disconnected. Returns at once.
        """
        with self._lock:
            self._expected = set(ranks) - self._members.keys() - self._disconnected - self._left
            self._expected_seconds = seconds

    def connect(self, rank: int, connection: Connection) -> None:
        """Add the connection of the member with group rank `rank`."""
        with self._lock:
            self._members[rank] = _Member(connection)
            self._expected.discard(rank)
            self._disconnected.discard(rank)
            self._send()

    def take(self, rank: int, line: bytes) -> None:
        """Process a line of the member with group rank `rank`. Raises `ValueError`."""
        member = self._members.get(rank)
        if member is not None:
            member.has_answered = True
        if line == _GOODBYE:
            self.mark_left(rank)
        elif line != _ANSWER:
            with self._lock:
                self._second = list(parse_json(line))
                self._send()

    def disconnect(self, rank: int, connection: Connection) -> None:
        """Remove the connection of the member with group rank `rank`, which has ended."""
        with self._lock:
            member = self._members.get(rank)
            if member is None or member.connection is not connection:
                return  # it has connected again
            del self._members[rank]
            if rank not in self._left:
                self._disconnected.add(rank)
                self._send()

    def mark_left(self, rank: int) -> None:
        """Tell the members that the one with group rank `rank` leaves on purpose."""
        with self._lock:
            self._left.add(rank)
            self._send()

    def send(self) -> None:
        """Send a line to all members. To be called once in each interval."""
        with self._lock:
            now = time.monotonic()
            # capped: if this process was paused, the others were not silent
            elapsed = min(now - self._sent_at, 2 * INTERVAL_SECONDS)
            self._sent_at = now
            for member in self._members.values():
                member.silence = 0.0 if member.has_answered else member.silence + elapsed
                member.has_answered = False
            self._expected_seconds -= elapsed
            if self._expected_seconds < 0:
                self._disconnected |= self._expected - self._left
                self._expected = set()
            self._send()

    def _send(self) -> None:
        silences = [[rank, member.silence] for rank, member in self._members.items()]
        late = [pair for pair in silences if pair[1] > INTERVAL_SECONDS]
        news = [sorted(self._disconnected), sorted(self._left), late, self._second]
        line = encode_json(news).encode() + b"\n"
        for member in self._members.values():
            member.connection.offer(line)


class MemberConnection:
    """A member's connection to the host of its round, kept by a thread until `leave`, with the
    group rank of this member. `on_second` is called once, on the thread, with the fields of the
    second host.
    """

    def __init__(
        self,
        host: ExchangeHost,
        rank: int,
        *,
        on_second: Callable[[list[Any]], None] = lambda _: None,
    ) -> None:
        self.host = host
        self._on_second = on_second
        self._second: list[Any] | None = None
        self._announcement = b""
        self._request = host.opening + encode_json({MEMBER: rank}).encode() + b"\n"
        self._disconnected: dict[int, float] = {}
        self._left: set[int] = set()
        self._silences: dict[int, float] = {}
        self._longest_silence = 0.0
        self._lines = self._counted_lines = 0
        self._host_silence = 0.0
        self._counted_at = time.monotonic()
        self._socket: socket.socket | None = None
        self._ended = threading.Event()
        start_thread(self._run, name="kdist-membership", on_error=OnError.RESTART)

    def disconnected(self, seconds: float = 0.0) -> set[int]:
        """The group ranks of the members that have been disconnected for at least `seconds`."""
        now = time.monotonic()
        return {rank for rank, since in self._disconnected.items() if now - since >= seconds}

    def left(self) -> set[int]:
        """The group ranks of the members that have left on purpose."""
        return set(self._left)

    def silent(self, seconds: float) -> set[int]:
        """The group ranks of the members that have been silent for more than `seconds`, or for
        longer if earlier silences were long. To be called several times in an interval.
        """
        now = time.monotonic()
        # capped: if this process was paused, the host was not silent
        elapsed = min(now - self._counted_at, INTERVAL_SECONDS)
        self._counted_at = now
        if self._lines != self._counted_lines or not self._lines:
            self._note_end(self._host_silence)
            self._host_silence = 0.0
        else:
            self._host_silence += elapsed
        self._counted_lines = self._lines
        bound = max(seconds, _SILENCE_FACTOR * self._longest_silence)
        if self._host_silence > 2 * INTERVAL_SECONDS:  # then it reports on nobody else
            return {self.host.rank} if self._host_silence > bound else set()
        return {rank for rank, silence in self._silences.items() if silence > bound}

    def note_host_end(self) -> None:
        """Count the host as disconnected until it sends a line again: it has ended, perhaps before
        this member could connect to it.
        """
        self._set_disconnected([*self._disconnected, self.host.rank])

    def announce(self, second: Sequence[Any]) -> None:
        """Tell the members the fields of the second host."""
        self._announcement = encode_json(second).encode() + b"\n"
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.sendall(self._announcement)

    def leave(self) -> None:
        """Close the connection on purpose: this member has left, and is not disconnected."""
        self._ended.set()
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.sendall(_GOODBYE + b"\n")
                connection.shutdown(socket.SHUT_WR)

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError, ValueError):  # the host does not listen, or is another process
                self._follow()
            self._ended.wait(_RETRY_SECONDS)

    def _follow(self) -> None:
        """Connect to the host and read what it sends, until the connection ends."""
        with socket.create_connection(
            (self.host.address, self.host.port), _CONNECT_SECONDS
        ) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._request)
            with connection.makefile("rb") as lines:
                self._read(lines.readline(_HOST_LINE_BYTES))
                connection.settimeout(None)
                self._socket = connection
                if self._ended.is_set():
                    self.leave()
                with suppress(OSError):
                    connection.sendall(self._announcement)
                    while line := lines.readline(_HOST_LINE_BYTES):
                        self._read(line)
                        connection.sendall(_ANSWER + b"\n")
            if self.host.rank not in self._left:
                self.note_host_end()

    def _read(self, line: bytes) -> None:
        """Process a line of the host."""
        disconnected, left, late, second = parse_json(line)
        if second is not None and self._second is None:
            self._second = second
            self._on_second(second)
        silences = dict(late)
        for rank, silence in self._silences.items():
            if silences.get(rank, 0.0) < silence and rank not in disconnected:
                self._note_end(silence)
        self._silences = silences
        self._set_disconnected(disconnected)
        self._left = set(left)
        self._lines += 1

    def _note_end(self, silence: float) -> None:
        self._longest_silence = max(self._longest_silence, silence)

    def _set_disconnected(self, ranks: list[int]) -> None:
        now = time.monotonic()
        self._disconnected = {rank: self._disconnected.get(rank, now) for rank in ranks}

"""A member's connections in one round: to its host, and to a second host.

The host of a round holds a connection to each member, and tells the others when one of them ends.
If the host is lost together with another member, no one is left who has seen the end of that one,
which is then noticed only when its keep-alives are missed, seconds later. So in a round of three or
more there is a second host: of the other members, the one with the lowest group rank. The others
hear its address from the host of the round. No generation number and no membership depends on it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from kdist_trainer.rendezvous.exchange import ExchangeHost, ExchangeServer
from kdist_trainer.rendezvous.membership import MemberConnection


class RoundMembership:
    """The connections of one member of a round, kept until `leave` or `end`.

    Args:
        server: The server of this agent.
        host: The host of the round.
        rank: The group rank of this member.
        ranks: Those of all members.
    """

    def __init__(
        self, server: ExchangeServer, host: ExchangeHost, *, rank: int, ranks: Collection[int]
    ) -> None:
        self._server = server
        self._host = host
        self._rank = rank
        self._lock = threading.Lock()
        self._has_left = False
        self.connections: list[MemberConnection] = []
        with self._lock:  # the second host may be known before there is a list
            self.connections = [MemberConnection(host, rank, on_second=self._connect_second)]
        others = sorted({*ranks} - {host.rank})
        if len(others) > 1 and others[0] == rank:
            second = server.offer(host.round, rank)
            if second is not None:  # else the round has only one host
                self.connections[0].announce(second.public_fields())

    def disconnected(self, seconds: float = 0.0) -> set[int]:
        """See `MemberConnection.disconnected`."""
        return set[int]().union(*(each.disconnected(seconds) for each in self.connections))

    def gone(self) -> set[int]:
        """The group ranks of the other members that are disconnected or have left on purpose."""
        gone = [each.disconnected() | each.left() for each in self.connections]
        return set[int]().union(*gone) - {self._rank}

    def silent(self, seconds: float) -> set[int]:
        """See `MemberConnection.silent`."""
        return set[int]().union(*(each.silent(seconds) for each in self.connections))

    def note_host_end(self) -> None:
        """See `MemberConnection.note_host_end`."""
        self.connections[0].note_host_end()

    def leave(self) -> None:
        """Close the connections; for the others this member is not disconnected."""
        with self._lock:
            self._has_left = True
        for each in self.connections:
            each.leave()

    def end(self) -> None:
        """Leave at the end of this process, which may be one of the hosts."""
        for each in self.connections:
            self._server.mark_left(each.host)
        self.leave()

    def _connect_second(self, fields: list[Any]) -> None:
        """Connect to the second host too."""
        if not ExchangeHost.is_valid(tuple(fields)):
            return
        second = ExchangeHost.from_public(fields, self._server.key)
        with self._lock:
            if second is not None and not self._has_left:
                self.connections = [*self.connections, MemberConnection(second, self._rank)]

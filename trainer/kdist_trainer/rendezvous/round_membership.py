"""A member's connections in one round: to its host, and to a second host.

The host of a round holds a connection to each member, and tells the others when one of them ends.
If the host is lost together with another member, no one is left who has seen the end of that one,
which is then noticed only when its keep-alives are missed, seconds later. So in a round of three or
more there is a second host: of the other members, the one with the lowest group rank. The others
read its address from the exchange of the round. No generation number and no membership depends on
it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from contextlib import closing, suppress
from functools import partial

from torch.distributed import DistError

from kdist_trainer.rendezvous.exchange import ExchangeHost, ExchangeServer, ExchangeStore
from kdist_trainer.rendezvous.membership import MemberConnection
from kdist_trainer.threads import OnError, start_thread
from kdist_trainer.untrusted_text import parse_json

_SECOND_HOST = "kdist/second-host"
_SECONDS = 60.0
"""How long the others wait for the address of the second host."""


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
        self.connections = [MemberConnection(host, rank)]
        others = sorted({*ranks} - {host.rank})
        if len(others) > 1:
            start_thread(
                partial(self._connect_second, others[0]),
                name="kdist-second-host",
                on_error=OnError.REPORT,  # the round has one host then
            )

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

    def _connect_second(self, second_rank: int) -> None:
        """Connect to the second host, or become it. If that fails, the round has only one host."""
        with suppress(DistError, OSError, ValueError, TypeError):
            second = self._offer() if second_rank == self._rank else self._read()
            with self._lock:
                if second is not None and not self._has_left:
                    self.connections = [*self.connections, MemberConnection(second, self._rank)]

    def _offer(self) -> ExchangeHost | None:
        second = self._server.offer(self._host.round, self._rank)
        if second is not None:
            with closing(ExchangeStore(self._host, timeout_seconds=_SECONDS)) as store:
                store.set(_SECOND_HOST, json.dumps(second.public_fields()))
        return second

    def _read(self) -> ExchangeHost | None:
        with closing(ExchangeStore(self._host, timeout_seconds=_SECONDS)) as store:
            fields = parse_json(store.get(_SECOND_HOST))
        return ExchangeHost.from_public(fields, self._server.key)

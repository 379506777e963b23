"""torch's dynamic (c10d) rendezvous with kdist's timings, and a way to leave it.

torch polls every second, notices a dead node after 15 s, and keeps each round open for 30 s: right
for a thousand nodes, slow for four. The protocol is unchanged. torch's private names are in
`torch_internals`.

`RoundMembership` holds a member's connections in one round: to its host, and to a second host. The
host of a round tells the others when one of its connections ends. If the host is lost together with
another member, nobody is left who saw the connection of that member end, and its loss is noticed
only seconds later, by missed keep-alives. So a round of three or more has a second host: the member
with the lowest group rank apart from the host, which passes on the address. Neither generation
numbers nor membership depend on it.

`pick_port` picks the port at which rank 0 of a process group listens, outside the kernel's
ephemeral range. torch takes an ephemeral port, and until rank 0 listens there, seconds later, the
kernel may assign it to any connection of this host.
"""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.elastic.utils.distributed import get_free_port

from kdist_trainer.rendezvous.configmap_client import JITTER
from kdist_trainer.rendezvous.exchange import (
    ExchangeHost,
    ExchangeServer,
    ExchangeStore,
    HostEndedError,
)
from kdist_trainer.rendezvous.many_nodes import Gathering, Relay, RelayHost, RelayMember
from kdist_trainer.rendezvous.membership import (
    DISCONNECTED_SECONDS,
    SILENCE_SECONDS,
    MemberConnection,
)
from kdist_trainer.rendezvous.state import (
    Peers,
    RendezvousState,
    RendezvousStatus,
    RendezvousTimings,
    open_key,
)
from kdist_trainer.rendezvous.stores import FileStore, KubernetesStore
from kdist_trainer.rendezvous.torch_internals import (
    Node,
    RendezvousBase,
    own_store_in_each_round,
    replace_polling,
    replace_port_picker,
)

_FIRST, _LAST = 10_000, 32_767
_MIN_CHOICE = 1000
_ATTEMPTS = 50
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()


def pick_port() -> int:
    """A free port of this host, below the kernel's ephemeral range if that leaves enough ports."""
    try:
        last = min(_LAST, int(_RANGE.read_text().split()[0]) - 1)
    except (OSError, ValueError, IndexError):
        last = _LAST  # on other systems, such as macOS, the ephemeral range begins above
    for _ in range(_ATTEMPTS if last - _FIRST >= _MIN_CHOICE else 0):
        port = _random.randint(_FIRST, last)
        if _is_free(port):
            return port
    return int(get_free_port())  # type: ignore[no-untyped-call]


def _is_free(port: int) -> bool:
    """Whether a server can listen at the port on all addresses of this host."""
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("", port))
                server.listen()
                return True
        except OSError as error:
            # otherwise the host has no IPv6
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return False


class RoundMembership:
    """The connections of one member of a round, kept until `leave` or `end`; `rank` and `ranks` are
    group ranks, of this member and of all.
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
        with self._lock:  # `_connect_second` waits until there is a list
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

    def leave(self) -> None:
        """Close the connections on purpose: this member has left, and is not disconnected."""
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
        if not ExchangeHost.is_valid(tuple(fields)):
            return
        second = ExchangeHost.from_public(fields, self._server.key)
        with self._lock:
            if second is not None and not self._has_left:
                self.connections = [*self.connections, MemberConnection(second, self._rank)]


_REMOVAL_ATTEMPTS = 10
_COPY_SECONDS = 1.0
"""The greatest age of a copy of the ConfigMap that the host of a round publishes."""
NodeCounts = tuple[int, int]
"""The minimum and the maximum number of nodes."""


class Rendezvous(RendezvousBase):
    """A `RendezvousHandler` for the elastic agent; `open_rendezvous` creates it."""

    _state_holder: RendezvousState

    def __init__(
        self,
        store: Store,
        settings: RendezvousSettings,
        state: RendezvousState,
        *,
        address: str | None,
        index: int,
        node_counts: Callable[[], NodeCounts],
        exchange_seconds: float | None = None,
        relayed: KubernetesStore | None = None,
    ) -> None:
        super().__init__(store, settings, state, address=address or socket.getfqdn(), index=index)
        self.timings = state.timings
        self._members: set[Node] = set()
        self._node_counts = node_counts
        state.before_sync = self._prepare_sync
        state.node = self.node
        self._server = ExchangeServer(self.node.addr, key=state.key, nodes=lambda: node_counts()[1])
        self.refused = self._server.refused
        self._exchange_seconds = exchange_seconds
        self.has_key = state.key.exists if exchange_seconds is not None else lambda: None
        state.offer_host = self._server.offer
        state.find_dead = lambda: self._disconnected() | self._silent()
        self._membership: RoundMembership | None = None
        self._nodes: dict[int, Node] = {}
        self.exchange: ExchangeStore | None = None
        """The exchange of the latest round, once that is complete; None without one."""
        self._failed_exchanges = 0
        """Failures since the last exchange that succeeded."""
        self._place = 0, 1
        self._relayed = relayed
        if relayed is not None and state.timings.gathers:
            state.gathering = Gathering(self.node, self._server, relayed)
        self._relay: Relay | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks share the agent's store. They create a new one in each round, since a
        shared one keeps the addresses of dead ranks.
        """
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; blocks until it is complete.

        Raises:
            RendezvousTimeoutError: If too few nodes joined in time.
            RendezvousClosedError: If the run is over.
            SpareNodeError: If the round is full, and `notify_if_spare` was called.
        """
        self._members = set()
        self._stop_relay()
        self.exchange = None
        self._state_holder.end_gathering()
        time.sleep(JITTER.uniform(0, self.timings.pace))
        with own_store_in_each_round():
            info = super().next_rendezvous()
        self._members = set(self._state_holder.state.participants)
        return info

    def notify_if_spare(self) -> None:
        """Have the next `next_rendezvous` raise `SpareNodeError`, once, if the round is full."""
        self._state_holder.notifies_spare = True

    def exchange_store(self, store: Store) -> Store:
        """See base class. If the state names a host, the store is the exchange in that agent.
        Raises `DistNetworkError` if that agent cannot be reached.
        """
        host = ExchangeHost.named_in(self._state_holder.state, self._server.key)
        if self._membership is not None:
            self._membership.leave()
        participants = self._state_holder.state.participants
        self._nodes = {rank: node for node, rank in participants.items()}
        self._membership = None
        if host is not None and len(participants) > 1:  # a node alone watches no other
            rank, ranks = participants[self.node], participants.values()
            self._membership = RoundMembership(self._server, host, rank=rank, ranks=ranks)
        if self._exchange_seconds is None or host is None:
            return store
        self._place = self.place()
        seconds = self.timings.connect_seconds(self._failed_exchanges)
        self._server.expect(host, self._nodes.keys(), seconds)
        self.exchange = ExchangeStore(host, timeout_seconds=self._exchange_seconds)
        self.exchange.while_waiting = self.check_connections
        return self.exchange

    @contextmanager
    def watching_departures(self) -> Iterator[None]:
        """For the time in which the agents of a round exchange keys: stop waiting for those of a
        node that has left the round, was removed from it or has died. At the end, start the relay.
        """
        store = self.store
        if isinstance(store, FileStore):
            store.while_waiting = self._check_departures
        try:
            yield
        except DistError as error:
            self._failed_exchanges += 1
            if isinstance(error, HostEndedError) and self._membership is not None:
                self._membership.connections[0].note_host_end()
            raise
        finally:
            if isinstance(store, FileStore):
                store.while_waiting = None
        self._failed_exchanges = 0
        if self.exchange is not None:
            self.exchange.while_waiting = None
        self._start_relay()

    def _check_departures(self) -> None:
        with suppress(RendezvousError):
            if left := self.status().left:
                raise DistStoreError(
                    f"{left} other nodes have left the rendezvous round before it was complete"
                )

    def check_connections(self) -> None:
        """Raise `DistStoreError` if another member of the round is lost or has left."""
        if self._membership is not None and (gone := self._membership.gone()):
            raise DistStoreError(
                f"{len(gone)} other nodes of the rendezvous round were lost or left"
            )

    def status(self) -> RendezvousStatus:
        """The current state; it is read from the store at most once per `first_poll`. Raises
        `RendezvousError` if the store cannot be read.
        """
        with self.lock:
            self._state_holder.sync()
            state = self._state_holder.state
            silent = self._state_holder.silent & self._members & state.participants.keys()
            # a node whose own keep-alives do not arrive cannot tell which others' are missing
            if self.node in silent:
                silent = set()
            joining = state.wait_list - self._members
            return RendezvousStatus(
                waiting=len(joining),
                vacant=max(0, self.settings.max_nodes - len(joining | state.participants.keys())),
                left=len(
                    self._members - state.participants.keys()
                    | self._disconnected(DISCONNECTED_SECONDS) & self._members
                ),
                silent=len(silent),
                closed=state.closed,
            )

    def peers(self) -> Peers | None:
        """The agents that this one hears and those that it misses, as of the last read of the
        rendezvous; None if this agent cannot tell. Thread-safe.
        """
        return self._state_holder.peers

    def count_members(self) -> int:
        """The number of nodes that are still in the current round."""
        with self.lock:
            self._state_holder.sync()
            return len(self._state_holder.state.participants)

    def leave(self) -> None:
        """Leave the round, so that the others need not wait until this node's keep-alives are
        missed.
        """
        self._stop_relay()
        self._state_holder.end_gathering()
        self.end_membership()
        self.exit_round(timeout_seconds=self.timings.keep_alive)

    def end_membership(self) -> None:
        """Tell the other members that this process ends on purpose."""
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.end()

    def has_silent_members(self) -> bool:
        """Whether another member of the round has been silent for `SILENCE_SECONDS`, by the
        members' connections. Call it several times a second.
        """
        return bool(self._silent())

    def _disconnected(self, seconds: float = 0.0) -> set[Node]:
        """The other members of the round that have been disconnected for at least `seconds`."""
        return self._others(lambda membership: membership.disconnected(seconds))

    def _silent(self) -> set[Node]:
        return self._others(lambda membership: membership.silent(SILENCE_SECONDS))

    def _others(self, choose: Callable[[RoundMembership], set[int]]) -> set[Node]:
        """The other members of the round whose group ranks `choose` returns."""
        if self._membership is None:
            return set()
        # a rank may have left the round before this node connected
        ranks = choose(self._membership) & self._nodes.keys()
        return {self._nodes[rank] for rank in ranks} - {self.node}

    def _prepare_sync(self) -> None:
        """Before each poll: apply the current limits, and use the relay's copy of the ConfigMap."""
        self.limit_nodes(*self._node_counts())
        relay = self._relay
        if relay is not None and self._relayed is not None and (copy := relay.latest()) is not None:
            self._relayed.offer(copy)

    def _start_relay(self) -> None:
        """Start this agent's part of the relay, unless it runs or the round has no exchange."""
        exchange, store = self.exchange, self._relayed
        if exchange is None or store is None or self._relay is not None:
            return
        rank, members = self._place
        interval = self.timings.relay
        if not self._server.is_host(exchange.host):
            self._relay = RelayMember(exchange, interval=interval, rank=rank)
        else:
            self._relay = RelayHost(
                exchange,
                interval=interval,
                members=members,
                read=lambda: store.fetch(fresh_seconds=_COPY_SECONDS),
                commit=lambda beats: self._commit_keep_alives(exchange.host.round, beats),
                commit_seconds=self.timings.keep_alive / 2,
            )
        self._relay.start()

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.stop()
            with self.lock:  # waits for a commit; a later one finds no relay
                self._relay = None

    def _commit_keep_alives(self, number: int, beats: Mapping[int, datetime]) -> bool:
        """Commit the keep-alives of the members of a round, by group rank, and this node's; False
        if others have changed the state meanwhile. Raises `RendezvousError` if the store cannot be
        written.
        """
        with self.lock:
            if self._relay is None:
                return True
            self._state_holder.expire()
            self._state_holder.sync()
            state = self._state_holder.state
            if state.round != number or self.node not in state.participants:
                return True
            keep_alives = state.last_heartbeats
            for node, rank in state.participants.items():
                if node in keep_alives and rank in beats:
                    keep_alives[node] = max(keep_alives[node], beats[rank])
            keep_alives[self.node] = datetime.now(UTC)
            self._state_holder.mark_dirty()
            return bool(self._state_holder.sync())

    def remove_predecessors(self, pids: Collection[int]) -> None:
        """Remove this host's dead processes from the state: earlier agents of this node."""
        for _ in range(_REMOVAL_ATTEMPTS):
            self._state_holder.sync()
            keep_alives = self._state_holder.state.last_heartbeats
            dead = [
                node
                for node in keep_alives
                if node.addr == self.node.addr and node.local_id in pids
            ]
            if not dead:
                return
            for node in dead:
                # the next read of the state drops nodes with such an old keep-alive
                keep_alives[node] = datetime.min.replace(tzinfo=UTC)
            self._state_holder.mark_dirty()
            self._state_holder.sync()


def open_rendezvous(
    store: Store,
    *,
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    address: str | None,
    index: int,
    timeout_seconds: float,
    state_store: Store | None = None,
    remote: bool = False,
    exchange_seconds: float | None = None,
    node_counts: Callable[[], NodeCounts] | None = None,
) -> Rendezvous:
    """Open the rendezvous of a run.

    Args:
        store: Holds the rendezvous state and what ranks exchange to connect.
        run_id: The id of the run; it separates the agents of this run from those of others.
        min_nodes: The fewest nodes of a round.
        max_nodes: The most nodes of a round.
        address: The address at which this node's ranks listen; None means the host's name.
        index: Orders the group ranks of the nodes that have the same address.
        timeout_seconds: How long a node waits for a round to complete.
        state_store: Another client of `store`, for the rendezvous state.
        remote: Whether each request goes to an API server; see `RendezvousTimings.for_nodes`.
        exchange_seconds: How long agents of a complete round wait for each other, over a store in
            one of them; None if they exchange through `store`.
        node_counts: Returns the current minimum and maximum, if they may change during the run.

    Raises:
        RendezvousConnectionError: If the store cannot be reached.
    """
    timings = RendezvousTimings.for_nodes(max_nodes, remote=remote)
    replace_port_picker(pick_port)
    settings = RendezvousSettings(
        run_id,
        min_nodes,
        max_nodes,
        RendezvousTimeout(
            join=timedelta(seconds=timeout_seconds),
            last_call=timedelta(seconds=timings.max_wait),
            heartbeat=timedelta(seconds=max(5.0, 2 * timings.keep_alive)),
        ),
        keep_alive_interval=timedelta(seconds=timings.keep_alive),
        keep_alive_max_attempt=timings.keep_alive_attempts,
    )
    state_store = state_store or store
    state = RendezvousState(C10dRendezvousBackend(state_store, run_id), settings, timings)
    state.key = open_key(store)
    replace_polling(state.pause)
    return Rendezvous(
        store,
        settings,
        state,
        address=address,
        index=index,
        node_counts=node_counts or (lambda: (min_nodes, max_nodes)),
        exchange_seconds=exchange_seconds,
        relayed=state_store if isinstance(state_store, KubernetesStore) else None,
    )

"""torch's copy of the shared rendezvous state, with kdist's rules for closing a round and for
declaring a node dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings

from kdist_trainer.rendezvous.exchange import ExchangeHost
from kdist_trainer.rendezvous.exchange_key import NO_KEY
from kdist_trainer.rendezvous.key_holders import all_have_key, name_key
from kdist_trainer.rendezvous.many_nodes import Gathering
from kdist_trainer.rendezvous.safe_state import SafeBackend
from kdist_trainer.rendezvous.configmap_client import JITTER
from kdist_trainer.rendezvous.timings import RendezvousTimings
from kdist_trainer.rendezvous.torch_internals import Node, StateHolder

_NEVER = timedelta(days=3650)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
"""The keep-alive of a node that is marked as dead."""
_CONFLICT_SECONDS = 0.01
_MOST_DOUBLINGS = 10
_MOST_POLL_SECONDS = 5.0
_POLL_FACTOR = 1.5


class SpareNodeError(RendezvousError):
    """The round has as many nodes as it may have: this one waits until it is needed."""


@dataclass(frozen=True)
class RendezvousStatus:
    """The state of the rendezvous, as an agent sees it whose workers run.

    Attributes:
        waiting: Nodes that want to join.
        vacant: Places that stay free once these have joined; no node can follow them if there is
            none.
        left: Members of the round that have left it, were removed or have died; they do not return
            to it.
        silent: Members of the round whose keep-alives are missing.
        closed: Whether the run is over, so that there are no more rounds.
    """

    waiting: int
    vacant: int
    left: int
    silent: int
    closed: bool


@dataclass(frozen=True)
class Peers:
    """The agents that the rendezvous lists, as one of them sees it, by their addresses.

    Attributes:
        heard: The agents whose keep-alives arrive.
        silent: The agents whose keep-alives are missing.
        read_at: The monotonic time at which the rendezvous was read.
    """

    heard: frozenset[str]
    silent: frozenset[str]
    read_at: float


class RendezvousState(StateHolder):
    """torch's copy of the shared state, with other rules for closing a round and for declaring a
    node dead.

    A round after the first is closed as soon as all nodes that are known to be there have joined
    it, if they are enough. Nodes that want to join, or have left the round before, are in the wait
    list: an elastic group that starts without one of them would have to restart at once.

    A node is dead when its keep-alive has not changed for a number of intervals, as seen by this
    node. torch compares the clocks of two nodes instead, and declares all nodes dead when a store
    returns after an outage. A member is dead at once if its connection tells so (see
    `kdist_trainer.rendezvous.membership`). A complete round does not lose a node for that alone: a
    dead member is removed by a member that has left the round, or by any node once all members are
    silent.
    """

    def __init__(
        self,
        backend: C10dRendezvousBackend,
        settings: RendezvousSettings,
        timings: RendezvousTimings,
    ) -> None:
        # With this interval torch itself declares only those nodes dead that are marked so.
        super().__init__(
            SafeBackend(backend),
            replace(settings, keep_alive_interval=_NEVER),
            cache_seconds=timings.first_poll,
        )
        self.timings = timings
        self.silent: set[Node] = set()
        """Nodes whose keep-alives are missing."""
        self.peers: Peers | None = None
        """The agents as of the last read; None before it, and while this node's own keep-alives do
        not arrive, which then says nothing about others.
        """
        self.before_sync: Callable[[], object] = _do_nothing
        """Called before each poll: the limits on the number of nodes may have changed."""
        self.node: Node | None = None
        """The node that this is the copy of."""
        self.offer_host: Callable[[int, int], ExchangeHost | None] = _offer_none
        """Returns this node, with its group rank, as the host of a round, or None."""
        self.key = NO_KEY
        """The key of the job's exchanges."""
        self.gathering: Gathering | None = None
        """How nodes join together; None where each joins by itself."""
        self.find_dead: Callable[[], set[Node]] = set
        """Returns the members of the latest round that are dead by what their connections tell."""
        self.notifies_spare = False
        """Whether to raise `SpareNodeError`, once, when this node has no place in a full round."""
        self._member_of: int | None = None
        self._keep_alives: dict[Node, tuple[datetime, float]] = {}
        self._read_at = time.monotonic()
        self._conflicts = 0
        self._poll = timings.first_poll
        self._is_complete = False
        """Whether the round was complete when the state was read."""
        self._is_participant = False
        """Whether this node was in the round when the state was read."""
        self._is_known = False
        """Whether the state was ever read."""

    def pause(self) -> None:
        """Wait until it is time for the next poll, or there is something new."""
        if self.gathering is None:
            time.sleep(self.poll_seconds())
        elif self._is_known and self.gathering.pause(self.poll_seconds()):
            self.expire()

    def end_gathering(self) -> None:
        """Join nobody any more, and ask nobody to."""
        if self.gathering is not None:
            self.gathering.begin()

    def poll_seconds(self) -> float:
        """The pause before the next poll: longer while many nodes have yet to join, shorter when
        this node has just changed the state.
        """
        poll, self._poll = self._poll, min(self.timings.poll, _POLL_FACTOR * self._poll)
        return max(poll, min(_MOST_POLL_SECONDS, self._joining_seconds()))

    def sync(self) -> bool | None:
        """See base class."""
        self.before_sync()
        if self.gathering is not None:
            self._join_together(self.gathering)
        if self.is_dirty:
            name_key(self.state, self.node, self.key)
            self._name_host()
        written = super().sync()
        if written is False:
            self._conflicts += 1
            # torch tries again at once: with many nodes, most of the writes would conflict.
            time.sleep(JITTER.uniform(0, self._conflict_seconds()))
            # A write succeeds only if no other node has written since the read. What was read
            # before the pause is likely to be out of date.
            self.expire()
            super().sync()
        elif written:
            self._conflicts = 0
            self._poll = self.timings.first_poll
        state = self.state
        self._is_complete = state.complete
        self._is_participant = self.node in state.participants
        self._is_known = True
        if self.gathering is not None:
            self.gathering.follow(state)
        if self.notifies_spare and self.node in state.redundancy_list and state.complete:
            self.notifies_spare = False
            raise SpareNodeError
        if (
            state.deadline is not None
            and not state.complete
            and state.round > 0
            and not state.wait_list
        ):
            # changed in this copy only, unless this node closes the round now
            state.deadline = datetime.now(UTC)
        return written

    def _conflict_seconds(self) -> float:
        """The longest pause after a conflict: as many nodes as have yet to join try to write."""
        backoff: float = _CONFLICT_SECONDS * 2 ** min(self._conflicts, _MOST_DOUBLINGS)
        if self.gathering is None or self.gathering.is_given_up:
            backoff = max(backoff, self._joining_seconds())
        return min(self.timings.spread, backoff)

    def _joining_seconds(self) -> float:
        """How long the store is busy at least until all nodes have joined the open round."""
        if self.state.complete:
            return 0.0
        joined: int = len(self.state.participants)
        return (self.timings.nodes - joined) * self.timings.write

    def _join_together(self, gathering: Gathering) -> None:
        """Have another node join this one, if that is what the next write is for; join those that
        have asked this one.
        """
        state = self.state
        if not self.is_dirty:
            for newcomer in gathering.newcomers(state):
                if len(state.participants) < self.max_nodes:
                    self.add_participant(newcomer)
                    name_key(state, newcomer, self.key)  # else it could not have asked
        elif self.node in state.participants and not (self._is_participant or self._is_complete):
            if gathering.ask(state):
                self.discard()
            elif not state.complete:
                gathering.name_in(state)

    def _name_host(self) -> None:
        """Name this node as the host if it is about to complete a round: one write commits the
        members of the round and their host.
        """
        state = self.state
        if (
            state.complete
            and not self._is_complete
            and self.node in state.participants
            and all_have_key(state, self.key)
            and (host := self.offer_host(state.round, state.participants[self.node])) is not None
        ):
            host.name_in(state)

    def adjust_state(self) -> None:
        """Mark the nodes as dead whose keep-alives are missing, where the rules allow it."""
        state, timings, now = self.state, self.timings, time.monotonic()
        elapsed = min(now - self._read_at, timings.keep_alive)
        self._read_at = now
        keep_alives = {}
        for node, latest in state.last_heartbeats.items():
            previous, unchanged = self._keep_alives.get(node, (latest, -elapsed))
            keep_alives[node] = (latest, unchanged + elapsed if latest == previous else 0.0)
        self._keep_alives = keep_alives
        self.silent = {
            node
            for node, (_, unchanged) in keep_alives.items()
            if unchanged > timings.keep_alive * timings.keep_alive_attempts
        }
        listed = {node for node, seen in state.last_heartbeats.items() if seen > _LONG_AGO}
        peers = Peers(_addresses(listed - self.silent), _addresses(self.silent), now)
        self.peers = None if self.node in self.silent else peers
        if self.node in state.participants:
            self._member_of = state.round
        has_left = self.node not in state.participants and self._member_of == state.round
        removable = not state.complete or has_left or state.participants.keys() <= self.silent
        dead = self.silent if removable else self.silent - state.participants.keys()
        if removable:
            dead = dead | (self.find_dead() & keep_alives.keys())
        for node in dead:
            state.last_heartbeats[node] = _LONG_AGO


def _addresses(nodes: set[Node]) -> frozenset[str]:
    return frozenset(str(node.addr) for node in nodes)


def _do_nothing() -> None:
    """The default of `RendezvousState.before_sync`."""


def _offer_none(*_: int) -> None:
    """The default of `RendezvousState.offer_host`: agents exchange through the store of the
    rendezvous.
    """

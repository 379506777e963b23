"""torch's dynamic (c10d) rendezvous with kdist's timings, and a way to leave it.

torch polls once a second, notices a dead node after fifteen, and holds each round open for half a
minute, which suits a thousand nodes and is slow for four. The protocol is unchanged. What torch
keeps private of it is in `torch_internals`.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)

from kdist_trainer.rendezvous.file_store import FileStore
from kdist_trainer.rendezvous.ports import pick_port
from kdist_trainer.rendezvous.torch_internals import (
    OWN_STORE_VARIABLE,
    Node,
    RendezvousBase,
    StateHolder,
    replace_polling,
    replace_port_picker,
)

JITTER = random.SystemRandom()
"""Spreads the agents' requests. It is not the module's generator, which user code may have
seeded.
"""


@dataclass(frozen=True)
class RendezvousTimings:
    """Timings in seconds. They grow with the number of nodes, so that a store sees about the same
    load from any job.
    """

    poll: float
    """The poll interval of the state while a round is open."""
    watch: float
    """The poll interval of the state while workers run."""
    keep_alive: float
    """The interval of keep-alives; a node that misses `keep_alive_attempts` of them in a row counts
    as dead.
    """
    keep_alive_attempts: int
    spread: float
    """The longest random pause of nodes that want to change the state at the same time."""
    last_call: float
    """How long a round with enough nodes waits for more when no node is known to be joining."""
    max_wait: float
    """How long a round waits at most for nodes that are known to be joining, and in the first round
    for all nodes: they are seldom ready together.
    """

    @classmethod
    def for_nodes(cls, nodes: int, *, remote: bool = False) -> RendezvousTimings:
        """The timings for a job of at most `nodes` nodes; if `remote`, each poll and each
        keep-alive is a request to an API server.
        """
        waits = {"last_call": 0.3 + nodes / 64, "max_wait": 5.0 + nodes / 32}
        if remote:  # while workers run: about five writes and a dozen reads a second in total
            return cls(
                poll=min(1.0, max(0.1, nodes / 64)),
                watch=max(1.0, nodes / 12),
                keep_alive=max(1.0, nodes / 5),
                keep_alive_attempts=4 if nodes <= 8 else 3,
                spread=min(2.0, max(0.1, nodes * 0.03)),
                **waits,
            )
        return cls(
            poll=min(1.0, max(0.05, nodes / 80)),
            watch=min(1.0, max(0.05, nodes / 80)),
            keep_alive=max(1.0, nodes / 32),
            keep_alive_attempts=3,
            spread=min(0.5, max(0.02, nodes * 0.002)),
            **waits,
        )


_NEVER = timedelta(days=3650)
_CONFLICT_SECONDS = 0.01
_REMOVAL_ATTEMPTS = 10
NodeCounts = tuple[int, int]
"""The minimum and the maximum number of nodes."""


class RendezvousState(StateHolder):
    """torch's copy of the shared state, with other rules for closing a round and for declaring a
    node dead.

    A round is closed as soon as all nodes that are known to be there have joined it. Nodes that
    want to join, or have left the round before, are in the wait list: an elastic group that starts
    without one of them would have to restart at once.

    A node is dead when its keep-alive has not changed for a number of intervals, as seen by this
    node. torch compares the clocks of two nodes instead, and declares all nodes dead when a store
    returns after an outage. A complete round does not lose a node for that alone: a silent member
    is removed by a member that has left the round, or by any node once all members are silent.
    """

    def __init__(
        self,
        backend: C10dRendezvousBackend,
        settings: RendezvousSettings,
        timings: RendezvousTimings,
    ) -> None:
        # With this interval torch itself declares only those nodes dead that are marked so.
        super().__init__(
            backend,
            replace(settings, keep_alive_interval=_NEVER),
            cache_seconds=timings.poll,
        )
        self.timings = timings
        self.silent: set[Node] = set()
        """Nodes whose keep-alives are missing."""
        self.before_sync: Callable[[], object] = _do_nothing
        """Called before each poll: the limits on the number of nodes may have changed."""
        self.node: Node | None = None
        """The node that this is the copy of."""
        self._member_of: int | None = None
        self._keep_alives: dict[Node, tuple[datetime, float]] = {}
        self._read_at = time.monotonic()
        self._conflicts = 0

    def sync(self) -> bool | None:
        """See base class."""
        self.before_sync()
        written = super().sync()
        timings = self.timings
        if written is False:
            self._conflicts += 1
            # torch tries again at once: with many nodes, most of the writes would conflict.
            time.sleep(
                JITTER.uniform(0, min(timings.spread, _CONFLICT_SECONDS * 2**self._conflicts))
            )
            # A write succeeds only if no other node has written since the read. What was read
            # before the pause is likely to be out of date.
            self.expire()
            super().sync()
        elif written:
            self._conflicts = 0
        state = self.state
        if (
            state.deadline is not None
            and not state.complete
            and state.round > 0
            and not state.wait_list
        ):
            opened_at = state.deadline - timedelta(seconds=timings.max_wait)
            if datetime.now(UTC) > opened_at + timedelta(seconds=timings.last_call):
                # changed in this copy only, unless this node closes the round now
                state.deadline = opened_at
        return written

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
        if self.node in state.participants:
            self._member_of = state.round
        has_left = self.node not in state.participants and self._member_of == state.round
        removable = not state.complete or has_left or state.participants.keys() <= self.silent
        for node in self.silent if removable else self.silent - state.participants.keys():
            state.last_heartbeats[node] = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class RendezvousStatus:
    """The state of the rendezvous, as an agent sees it whose workers run.

    Attributes:
        waiting: Nodes that want to join.
        vacant: Places that stay free once these have joined; no node can follow them if there is
            none.
        left: Members of the round that have left it or were removed; they do not return to it.
        silent: Members of the round whose keep-alives are missing.
        closed: Whether the run is over, so that there are no more rounds.
    """

    waiting: int
    vacant: int
    left: int
    silent: int
    closed: bool


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
    ) -> None:
        super().__init__(store, settings, state, address=address or socket.getfqdn(), index=index)
        self.timings = state.timings
        self._members: set[Node] = set()
        state.before_sync = lambda: self.limit_nodes(*node_counts())
        state.node = self.node

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
        """
        self._members = set()
        with _environment(OWN_STORE_VARIABLE, "1"):
            info = super().next_rendezvous()
        self._members = set(self._state_holder.state.participants)
        return info

    @contextmanager
    def watching_departures(self) -> Iterator[None]:
        """In a shared folder, stop waiting for the keys of a node that has left this round or was
        removed from it.
        """
        store = self.store
        if isinstance(store, FileStore):
            store.while_waiting = self._check_departures
        try:
            yield
        finally:
            if isinstance(store, FileStore):
                store.while_waiting = None

    def _check_departures(self) -> None:
        with suppress(RendezvousError):
            if left := self.status().left:
                raise DistStoreError(
                    f"{left} other nodes have left the rendezvous round before it was complete"
                )

    def status(self) -> RendezvousStatus:
        """The current state; it is read from the store at most once per `RendezvousTimings.poll`.

        Raises:
            RendezvousError: If the store cannot be read.
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
                left=len(self._members - state.participants.keys()),
                silent=len(silent),
                closed=state.closed,
            )

    def count_members(self) -> int:
        """The number of nodes that are still in the current round."""
        with self.lock:
            self._state_holder.sync()
            return len(self._state_holder.state.participants)

    def leave(self) -> None:
        """Leave the round, so that the others need not wait until this node's keep-alives are
        missed.
        """
        self.exit_round(timeout_seconds=self.timings.keep_alive)

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
                # nodes with so old a keep-alive are dropped when the state is read again
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
        node_counts: Returns the current minimum and maximum, if they may change during the run.

    Raises:
        RendezvousConnectionError: If the store cannot be reached.
    """
    timings = RendezvousTimings.for_nodes(max_nodes, remote=remote)
    replace_polling(timings.poll)
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
    backend = C10dRendezvousBackend(state_store or store, run_id)
    return Rendezvous(
        store,
        settings,
        RendezvousState(backend, settings, timings),
        address=address,
        index=index,
        node_counts=node_counts or (lambda: (min_nodes, max_nodes)),
    )


def _do_nothing() -> None:
    """The default of `RendezvousState.before_sync`."""


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the `with` block: torch reads it in the agent, and workers
    must not inherit it.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

"""The shared rendezvous state: torch's copy of it, with kdist's rules for closing a round and for
declaring a node dead, and with kdist's timings.

torch keeps the state as a pickle and reads it with `pickle.loads`, wherever it comes from. What
comes from others, over a ConfigMap, a relay, the gatherer or a TCPStore, is read here with an
allow-list and validated (`SafeBackend`), and pickled again for torch by this process. The state of
many nodes is compressed: that of 4,096 takes 425 KB in a ConfigMap otherwise, and each change of it
writes all of it.

Each node that writes the state leaves the fingerprint of its exchange key there. The key is a file
that may be missing, come late or differ from that of the others, as after a Secret was re-created.
A round gets an exchange only if all of its members have the same key; otherwise all exchange
through the store of the rendezvous.
"""

from __future__ import annotations

import pickle
import secrets
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, TypeGuard

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    RendezvousSettings,
    Token,
)

from kdist_trainer.formats.allow_list import AllowList, UnsafePickleError
from kdist_trainer.rendezvous.configmap_client import JITTER
from kdist_trainer.rendezvous.exchange import KEY_FILE, NO_KEY, ExchangeHost, ExchangeKey
from kdist_trainer.rendezvous.many_nodes import MOST_SINGLE, Gatherer, Gathering
from kdist_trainer.rendezvous.stores import KubernetesStore
from kdist_trainer.rendezvous.torch_internals import Node, State, StateHolder

KEYS_ATTRIBUTE = "kdist_exchange_keys"
"""The attribute of the rendezvous state that has the fingerprints, by node."""

_KEY = "kdist/exchange-key"
_KEY_BYTES = 32


def open_key(store: Store) -> ExchangeKey:
    """The key of the exchanges of a job with this store. Many can read a ConfigMap, so its key is
    mounted next to the token; any other store, which only agents can read, holds a random key.
    """
    if isinstance(store, KubernetesStore):
        return ExchangeKey((store.config_map.server.account / KEY_FILE).read_bytes)
    return ExchangeKey(lambda: store.compare_set(_KEY, "", secrets.token_hex(_KEY_BYTES)))


def name_key(state: State, node: Node | None, key: ExchangeKey) -> None:
    """Put the fingerprint of a node's key into a rendezvous state, and drop those of dead nodes."""
    known = state.last_heartbeats.keys() | state.participants.keys()
    found = {each: text for each, text in _fingerprints(state).items() if each in known}
    if node is not None:
        found.pop(node, None)
        if (fingerprint := key.fingerprint()) is not None:
            found[node] = fingerprint
    vars(state)[KEYS_ATTRIBUTE] = found


def all_have_key(state: State, key: ExchangeKey) -> bool:
    """Whether all participants of the round have this key."""
    fingerprint = key.fingerprint()
    held = _fingerprints(state)
    return fingerprint is not None and all(
        held.get(node) == fingerprint for node in state.participants
    )


def are_valid_keys(fields: object) -> bool:
    """Whether these fields of a rendezvous state are fingerprints by node, or None."""
    return fields is None or (_maps(fields) and all(type(text) is str for text in fields.values()))


def _fingerprints(state: State) -> dict[Node, str]:
    found: dict[Node, str] = vars(state).get(KEYS_ATTRIBUTE) or {}
    return found


_EXTENSIONS: dict[str, Callable[[object], bool]] = {
    ExchangeHost.ATTRIBUTE: ExchangeHost.is_valid,
    Gatherer.ATTRIBUTE: Gatherer.is_valid,
    KEYS_ATTRIBUTE: are_valid_keys,
}
"""What kdist adds to torch's state."""
_MOST_BYTES = 1 << 22  # a ConfigMap holds at most 1 MiB
_PLAIN_BYTES = 1 << 16
"""A state of at most so many bytes, that of some 800 nodes, is written as it is, so that agents of
a version that does not know compressed ones can take its place.
"""
_STATE: AllowList = AllowList(
    source="the rendezvous state",
    names={
        **{(kind.__module__, kind.__qualname__): kind for kind in (State, Node)},
        **{("datetime", kind.__qualname__): kind for kind in (datetime, timedelta, timezone)},
    },
    records={
        State: [*vars(State()), *_EXTENSIONS],
        Node: Node.__dataclass_fields__,
    },
    keys={Node: {"addr": (str,), "pid": (int,), "local_id": (int,)}},
)


def pack_state(data: bytes) -> bytes:
    """What is written of a rendezvous state that torch has pickled."""
    return data if len(data) <= _PLAIN_BYTES else zlib.compress(data)


def read_state(data: bytes) -> State:
    """Read what `pack_state` has returned. Raises `UnsafePickleError` if it is not valid, or refers
    to anything else.
    """
    if not data.startswith(pickle.PROTO):
        data = _decompress(data)
    if len(data) > _MOST_BYTES:
        raise UnsafePickleError(f"the rendezvous state has more than {_MOST_BYTES:,} bytes")
    state = _STATE.read(data)
    if type(state) is not State:
        raise UnsafePickleError("the rendezvous state is of another type")
    if wrong := sorted(name for name in vars(State()) if not _is_valid(name, vars(state))):
        raise UnsafePickleError(f"the rendezvous state has no valid {', '.join(wrong)}")
    for name, is_valid in _EXTENSIONS.items():
        if not is_valid(vars(state).get(name)):
            raise UnsafePickleError(f"the rendezvous state has no valid {name}")
    return state


def _decompress(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        return stream.decompress(data, _MOST_BYTES + 1)
    except zlib.error as error:
        raise UnsafePickleError(f"the rendezvous state is damaged: {error}") from error


def _is_valid(name: str, fields: dict[str, Any]) -> bool:
    value = fields.get(name, fields)
    match name:
        case "round":
            return type(value) is int
        case "complete" | "closed":
            return type(value) is bool
        case "deadline":
            return value is None or _is_moment(value)
        case "participants":
            return _maps(value) and all(type(rank) is int for rank in value.values())
        case "last_heartbeats":
            return _maps(value) and all(map(_is_moment, value.values()))
        case _:
            return type(value) is set and all(type(node) is Node for node in value)


def _maps(value: object) -> TypeGuard[dict[Node, Any]]:
    return type(value) is dict and all(type(node) is Node for node in value)


def _is_moment(value: object) -> bool:
    return type(value) is datetime and type(value.tzinfo) is timezone


class SafeBackend(RendezvousBackend):
    """A backend of torch's whose state is safe to unpickle."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        """See base class."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class. Raises `RendezvousStateError` for a state that is not safe."""
        found = self._backend.get_state()
        return None if found is None else (_clean(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class. Raises `RendezvousStateError` for a state that is not safe."""
        packed = pack_state(state)
        found = self._backend.set_state(packed, token)
        if found is None:
            return None
        if found[0] == packed:  # this process has pickled it
            return state, found[1], found[2]
        return _clean(found[0]), found[1], found[2]


def _clean(data: bytes) -> bytes:
    try:
        return pickle.dumps(read_state(data))
    except UnsafePickleError as error:
        raise RendezvousStateError(str(error)) from error


_CONNECT_SECONDS, _CONNECT_POLLS = 1.0, 4


@dataclass(frozen=True)
class RendezvousTimings:
    """Timings in seconds. They grow with the number of nodes, so that all jobs put about the same
    load on a store.
    """

    nodes: int
    """The most nodes of the job."""
    poll: float
    """The poll interval of the state while a round is open."""
    first_poll: float
    """The first such interval after this node has changed the state, since others respond to a
    change at once; the next intervals grow.
    """
    watch: float
    """The poll interval of the state while workers run."""
    relay: float
    """The interval at which one agent reads the state for all others, while workers run."""
    keep_alive: float
    """The interval of keep-alives; a node that misses `keep_alive_attempts` of them in a row counts
    as dead.
    """
    keep_alive_attempts: int
    write: float
    """About how long the store is busy with one change of the state."""
    pace: float
    """The longest random pause of a node before it joins."""
    gathers: bool
    """Whether a gatherer adds the nodes that join, since concurrent joins would conflict."""
    spread: float
    """The longest random pause of nodes that want to change the state at the same time."""
    max_wait: float
    """How long a round with enough nodes waits at most for nodes that are known to be joining, and
    in the first round for all nodes: they are seldom ready together.
    """

    def connect_seconds(self, failures: int) -> float:
        """How long the members of a complete round may take to see that it is complete and connect
        to its host, after that many failed exchanges in a row: a slow node gets more time.
        """
        return max(_CONNECT_SECONDS, _CONNECT_POLLS * self.poll) * 2.0 ** min(failures, 4)

    @classmethod
    def for_nodes(cls, nodes: int, *, remote: bool = False) -> RendezvousTimings:
        """The timings for a job of at most `nodes` nodes; if `remote`, each poll and each
        keep-alive is a request to an API server.
        """
        max_wait = 5.0 + nodes / 32
        if remote:  # without the relay: about five writes and a dozen reads a second in total
            keep_alive = max(1.0, nodes / 5)
            return cls(
                nodes=nodes,
                poll=(poll := min(2.0, max(0.1, nodes / 128))),
                first_poll=poll,
                watch=max(1.0, nodes / 12),
                relay=min(1.0, keep_alive / 4),
                keep_alive=keep_alive,
                keep_alive_attempts=4 if nodes <= MOST_SINGLE else 3,
                write=0.02,
                pace=nodes * 0.002 if nodes > MOST_SINGLE else 0.0,
                gathers=nodes > MOST_SINGLE,
                spread=min(5.0, max(0.1, nodes * 0.03)),
                max_wait=max_wait,
            )
        return cls(
            nodes=nodes,
            poll=(poll := min(1.0, max(0.05, nodes / 80))),
            first_poll=0.005 if nodes <= MOST_SINGLE else poll,
            watch=min(1.0, max(0.05, nodes / 80)),
            relay=min(1.0, max(0.05, nodes / 80)),
            keep_alive=max(1.0, nodes / 32),
            keep_alive_attempts=3,
            write=0.0,
            pace=0.0,
            gathers=False,
            spread=min(0.5, max(0.02, nodes * 0.002)),
            max_wait=max_wait,
        )


_NEVER = timedelta(days=3650)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
"""The keep-alive of a node that is marked as dead."""
_CONFLICT_SECONDS = 0.01
_MOST_DOUBLINGS = 10
_MOST_POLL_SECONDS = 5.0
_POLL_FACTOR = 1.5


class SpareNodeError(RendezvousError):
    """The round is full: this node waits until it is needed."""


@dataclass(frozen=True)
class RendezvousStatus:
    """The state of the rendezvous, as seen by an agent whose workers run.

    Attributes:
        waiting: Nodes that want to join.
        vacant: Places that are still free once these have joined.
        left: Members of the round that have left it, were removed or have died; they do not return
            to it.
        silent: Members of the round whose keep-alives are missing.
        closed: Whether the run is over, so that there are no more rounds.
    """

    waiting: int = 0
    vacant: int = 0
    left: int = 0
    silent: int = 0
    closed: bool = False


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

    A round after the first is closed as soon as all known nodes have joined it, if they are enough.
    Nodes that want to join, or have left the round before, are in the wait list: an elastic group
    that starts without one of them would have to restart at once.

    A node is dead when its keep-alive has not changed for a number of intervals, as seen by this
    node. torch compares the clocks of two nodes instead, and declares all nodes dead when a store
    returns after an outage. A member is dead at once if its connection shows it (see
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
        # With this interval torch itself declares only those nodes dead that kdist has marked.
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
        not arrive either, since it then cannot judge others.
        """
        self.before_sync: Callable[[], object] = lambda: None
        """Called before each poll: the limits on the number of nodes may have changed."""
        self.node: Node | None = None
        """The node that this copy belongs to."""
        self.offer_host: Callable[[int, int], ExchangeHost | None] = lambda *_: None
        """Returns this node, with its group rank, as the host of a round, or None."""
        self.key = NO_KEY
        """The key of the job's exchanges."""
        self.gathering: Gathering | None = None
        """How nodes join through a gatherer; None where each joins by itself."""
        self.find_dead: Callable[[], set[Node]] = set
        """Returns the members of the latest round that are dead according to their connections."""
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
        """Wait until the next poll is due, or something new has come."""
        if self.gathering is None:
            time.sleep(self.poll_seconds())
        elif self._is_known and self.gathering.pause(self.poll_seconds()):
            self.expire()

    def end_gathering(self) -> None:
        """Add no more nodes, and withdraw the request to be added."""
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
            # torch tries again at once: with many nodes, most of the writes would conflict. The
            # pause grows with the nodes that have yet to join, since all of them try to write.
            backoff: float = _CONFLICT_SECONDS * 2 ** min(self._conflicts, _MOST_DOUBLINGS)
            if self.gathering is None or self.gathering.is_given_up:
                backoff = max(backoff, self._joining_seconds())
            time.sleep(JITTER.uniform(0, min(self.timings.spread, backoff)))
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

    def _joining_seconds(self) -> float:
        """The least time that the store needs until all nodes have joined the open round."""
        if self.state.complete:
            return 0.0
        joined: int = len(self.state.participants)
        return (self.timings.nodes - joined) * self.timings.write

    def _join_together(self, gathering: Gathering) -> None:
        """Ask the gatherer to add this node, if the next write would be to join; as the gatherer,
        add those that have asked.
        """
        state = self.state
        if not self.is_dirty:
            for newcomer in gathering.newcomers(state):
                if len(state.participants) < self.max_nodes:
                    self.add_participant(newcomer)
                    name_key(state, newcomer, self.key)  # has asked, so it has this key
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
        """Mark nodes as dead, by the rules in the docstring of the class."""
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

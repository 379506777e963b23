"""Lets many nodes join a round together, and stay in it, with few requests to the API server.

Joining: one of the nodes, the gatherer, adds the others to the round. A join replaces the whole
state if it has not changed since it was read. Of concurrent joins, all but one are repeated, so
nodes that start together would write again and again. Therefore the first node of a round names
itself as the gatherer in the write with which it joins. The others ask it, and it adds all that
have asked in a single write. When the round is complete, it sends them its copy of the state.

While workers run, one agent, the relay, reads the ConfigMap and sends keep-alives for its whole
round. It is the host of the round's exchange, where it publishes its copies of the ConfigMap. From
time to time it commits the keep-alives that the others leave there, all in one write.

Only the ConfigMap decides who is in a round: every write is a compare-and-swap, which fails if it
is based on an old copy. Any node may act alone at any time: it joins by itself, and names itself as
the next gatherer, if the gatherer cannot be reached, ends or does not add it in time; and it reads
the ConfigMap and sends its own keep-alives if it hears nothing new from the host.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousError

from kdist_trainer.processes.threads import OnError, start_thread
from kdist_trainer.rendezvous.configmap_client import ApiRejectedError, Copy
from kdist_trainer.rendezvous.exchange import (
    ExchangeHost,
    ExchangeServer,
    ExchangeStore,
    JoinRequest,
)
from kdist_trainer.rendezvous.stores import KubernetesStore
from kdist_trainer.rendezvous.torch_internals import Node

MOST_SINGLE = 8  # nodes of a job, up to which each joins by itself
_ANSWER_SECONDS = 2.0
"""How long a node waits for the gatherer before it reads the ConfigMap."""
_MOST_WAITS = 2
"""How often a node waits for the gatherer in vain before it joins by itself."""
_MOST_GATHERERS = 2
"""How many gatherers of one round may fail before a node joins by itself."""
_BATCH_SECONDS = 0.02
"""How long the gatherer waits for further requests after one: about as long as a write takes."""


class Gatherer(ExchangeHost):
    """The gatherer of a round, as the rendezvous state names it. It has no group rank yet: `rank`
    is the index of the node.
    """

    ATTRIBUTE = "kdist_gatherer"

    def is_node(self, node: Node) -> bool:
        """Whether the gatherer is this node."""
        return (node.addr, node.pid) == (self.address, self.rank)


class Gathering:
    """One node's part in the gathering of each round; `store` has the rendezvous state."""

    def __init__(self, node: Node, server: ExchangeServer, store: KubernetesStore) -> None:
        self._node = node
        self._server = server
        self._store = store
        self._own: Gatherer | None = None
        self._is_named = False
        """Whether the state has named this node."""
        self._request: JoinRequest | None = None
        self._waits = 0
        self._failed: set[str] = set()
        """The tokens of gatherers of this round that have not added this node."""
        self._lost: Gatherer | None = None
        """One of them that has ended."""

    def begin(self) -> None:
        """Begin another round, or end this node's part in the current one."""
        self._end_own()
        self._withdraw()
        self._waits = 0
        self._failed = set()
        self._lost = None

    @property
    def is_given_up(self) -> bool:
        """Whether this node joins by itself, without naming itself as the gatherer."""
        return len(self._failed) >= _MOST_GATHERERS or self._server.key.fingerprint() is None

    def name_in(self, state: Any) -> None:
        """Name this node as the gatherer in the state with which it joins, unless another one is
        named that may still add it. A gatherer that has ended is removed, since no round can start
        with it; if only its connection to this node has ended, it joins again.
        """
        named = Gatherer.named_in(state, self._server.key)
        if named is not None and named == self._lost:
            for node in [node for node in state.participants if named.is_node(node)]:
                del state.participants[node], state.last_heartbeats[node]
        if self.is_given_up or (named is not None and named.token not in self._failed):
            return
        if self._own is None or self._own.round != state.round:
            self._end_own()
            host = self._server.offer(state.round, self._node.pid)
            self._own = None if host is None else Gatherer(*astuple(host))
        if self._own is not None:
            self._own.name_in(state)

    def ask(self, state: Any) -> bool:
        """Ask the gatherer to add this node, and wait a while; after that the state must be read.
        Returns False if this node must join by itself.
        """
        named = Gatherer.named_in(state, self._server.key)
        if named is None or named == self._own or named.token in self._failed or self.is_given_up:
            return False
        try:
            if self._request is None or self._request.host != named:
                self._withdraw()
                self._request = JoinRequest(named, self._node)
                self._waits = 0
            if self._waits >= _MOST_WAITS:
                raise TimeoutError
            self._waits += 1
            self._wait(_ANSWER_SECONDS)
        except (OSError, ApiRejectedError) as error:
            self._failed.add(named.token)
            if isinstance(error, ConnectionError):
                self._lost = named
            self._withdraw()
            return False
        return True

    def pause(self, seconds: float) -> bool:
        """Wait for at most `seconds`: as the gatherer for requests, as another node for its copy of
        the state. Returns whether to read the state now.
        """
        if self._own is not None and self._is_named:
            if self._server.join_requests(self._own).wait(seconds):
                time.sleep(_BATCH_SECONDS)
            return False
        try:
            if self._request is not None:
                return self._wait(seconds)
        except (OSError, ApiRejectedError):
            self._withdraw()
            return True  # it may have ended the round
        time.sleep(seconds)
        return False

    def newcomers(self, state: Any) -> list[Node]:
        """The nodes that have asked this one, if it is the gatherer of an open round."""
        own = self._own
        if own is None or state.complete or Gatherer.named_in(state, self._server.key) != own:
            return []
        return [
            node
            for node in self._server.join_requests(own).nodes()
            if node not in state.participants
        ]

    def follow(self, state: Any) -> None:
        """Process a state that was read or written: once a round is complete, its gatherer answers
        all requests, and other nodes withdraw theirs.
        """
        if state.complete:
            self._withdraw()
        if self._own is None:
            return
        if Gatherer.named_in(state, self._server.key) == self._own:
            self._is_named = True
            if not state.complete:
                return
        elif not self._is_named:
            return  # the write that names it is still to come
        self._end_own(self._store.fetch(fresh_seconds=math.inf).to_json() + b"\n")

    def _wait(self, seconds: float) -> bool:
        """Wait for the response, a copy of the ConfigMap, and have the store use it."""
        assert self._request is not None  # noqa: S101 - for the type checker: both callers have one
        response = self._request.wait(seconds)
        if response is None:
            return False
        self._store.offer(Copy.from_json(response))
        self._withdraw()
        return True

    def _end_own(self, response: bytes = b"") -> None:
        own, self._own, self._is_named = self._own, None, False
        if own is not None:
            self._server.join_requests(own).end(response)

    def _withdraw(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.close()


_PULSE, _COPY, _BEAT = "relay/pulse", "relay/copy", "relay/beat/"
_MISSED_PULSES = 3


class Relay(ABC):
    """This agent's part of the relay of one round, in a thread that `start` starts and that has a
    turn every `interval` seconds.
    """

    def __init__(self, exchange: ExchangeStore, *, interval: float) -> None:
        self._exchange = exchange
        self._interval = interval
        self._latest: tuple[Copy, float] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        start_thread(self._run, name="kdist-relay", on_error=OnError.RESTART)

    def stop(self) -> None:
        """Have the thread end after its turn, which may wait for the host or the API server."""
        self._stopped.set()

    def latest(self) -> Copy | None:
        """The newest copy of the ConfigMap; None if nothing came from the host for a while."""
        latest = self._latest
        if latest is None or self._stopped.is_set():
            return None
        copy, heard_at = latest
        return copy if time.monotonic() - heard_at <= _MISSED_PULSES * self._interval else None

    def _run(self) -> None:
        with suppress(DistError, ValueError):  # the host is lost, and with it the relay
            while not self._stopped.wait(self._interval):
                self._take_turn()

    @abstractmethod
    def _take_turn(self) -> None:
        """What the thread does in each interval. Raises `DistError` if the host is lost."""


class RelayHost(Relay):
    """The part of the agent that hosts the exchange of `members` agents. It reads the ConfigMap
    every `interval` seconds, and every `commit_seconds` it commits keep-alives, by group rank;
    `commit` returns whether they were committed.
    """

    def __init__(
        self,
        exchange: ExchangeStore,
        *,
        interval: float,
        members: int,
        read: Callable[[], Copy],
        commit: Callable[[Mapping[int, datetime]], bool],
        commit_seconds: float,
    ) -> None:
        super().__init__(exchange, interval=interval)
        self._keys = [f"{_BEAT}{rank}" for rank in range(members)]
        self._read = read
        self._commit = commit
        self._commit_seconds = commit_seconds
        # the others have left theirs by the second turn
        self._commit_at = time.monotonic() + 2 * interval
        self._published: int | None = None
        self._turns = 0

    def _take_turn(self) -> None:
        try:
            copy = self._read()
        except DistError:
            return  # without a pulse the others read the ConfigMap themselves
        self._latest = copy, time.monotonic()
        if copy.version != self._published:
            self._exchange.set(_COPY, copy.to_json())
            self._published = copy.version
        self._turns += 1
        self._exchange.set(_PULSE, f"{self._turns} {copy.version}")
        if time.monotonic() >= self._commit_at:
            beats = {
                rank: datetime.fromisoformat(text.decode())
                for rank, text in enumerate(self._exchange.peek(self._keys))
                if text is not None
            }
            with suppress(RendezvousError):  # the next turn tries again
                if self._commit(beats):
                    self._commit_at = time.monotonic() + self._commit_seconds


class RelayMember(Relay):
    """The part of every other agent, which has this group rank; `interval` is the seconds between
    two keep-alives.
    """

    def __init__(self, exchange: ExchangeStore, *, interval: float, rank: int) -> None:
        super().__init__(exchange, interval=interval)
        self._key = f"{_BEAT}{rank}"
        self._copy: Copy | None = None
        self._pulse: bytes | None = None

    def _take_turn(self) -> None:
        self._exchange.set(self._key, datetime.now(UTC).isoformat())
        (pulse,) = self._exchange.peek([_PULSE])
        if pulse is None or pulse == self._pulse:
            return
        if self._copy is None or self._copy.version != int(pulse.split()[1]):
            self._copy = Copy.from_json(self._exchange.get(_COPY))
        self._pulse = pulse
        self._latest = self._copy, time.monotonic()

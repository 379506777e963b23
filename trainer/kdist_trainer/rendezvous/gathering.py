"""How the nodes of a large job join a round together: one of them, the gatherer, joins all.

A join replaces the whole state if it has not changed since it was read. Of joins that meet, all but
one are repeated, so nodes that start together would write again and again. Therefore the first node
of a round names itself as the gatherer in the write by which it joins. The others ask it, and it
joins as many as have asked in a single write. When the round is complete, it sends them its copy of
the state.

The ConfigMap stays the only place where a round gets its members: the gatherer's write is a
compare-and-swap like every other, and its copy is only a read. Any node may join by itself at any
time. It does so if the gatherer cannot be reached, ends or does not join it in time, and names
itself as the next one.
"""

from __future__ import annotations

import math
import time
from dataclasses import astuple
from typing import Any

from kdist_trainer.rendezvous.configmap_client import ApiRejectedError, Copy
from kdist_trainer.rendezvous.exchange import ExchangeHost, ExchangeServer
from kdist_trainer.rendezvous.join_requests import JoinRequest
from kdist_trainer.rendezvous.kubernetes_store import KubernetesStore
from kdist_trainer.rendezvous.torch_internals import Node

_ANSWER_SECONDS = 2.0
"""How long a node waits for the gatherer before it reads the ConfigMap."""
_MOST_WAITS = 2
"""How often a node finds that it was not joined before it joins by itself."""
_MOST_GATHERERS = 2
"""How many gatherers of one round a node asks, if they fail."""
_BATCH_SECONDS = 0.02
"""How long the gatherer waits for further requests after one: about as long as a write takes."""


class Gatherer(ExchangeHost):
    """The gatherer of a round, as the rendezvous state names it. It has no group rank yet: `rank`
    is the index of the node.
    """

    ATTRIBUTE = "kdist_gatherer"

    def is_node(self, node: Node) -> bool:
        """Whether it is this node."""
        return (node.addr, node.pid) == (self.address, self.rank)


class Gathering:
    """One node's part in the gathering of each round.

    Args:
        node: The node.
        server: The server of its exchanges.
        store: Has the rendezvous state.
    """

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
        """The tokens of gatherers of this round that have not joined this node."""
        self._lost: Gatherer | None = None
        """One of them that has ended."""

    def begin(self) -> None:
        """Begin another round, or end the part in this one: nobody is joined any more."""
        self._end_own()
        self._withdraw()
        self._waits = 0
        self._failed = set()
        self._lost = None

    @property
    def is_given_up(self) -> bool:
        """Whether this node joins by itself, as do others then."""
        return len(self._failed) >= _MOST_GATHERERS or self._server.key.fingerprint() is None

    def name_in(self, state: Any) -> None:
        """Name this node as the gatherer in a state by which it joins, unless another one is named
        that may join it. One that has ended is removed: the round would not be complete with it. If
        it has ended for this node alone, it joins again.
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
        """Ask the gatherer to join this node, and wait a while; then the state has to be read.
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
        """Wait for at most `seconds`, as the gatherer for requests and as another node for the
        state; returns whether this node has got it.
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
        """Take in a state that was read or written: once a round is complete, its gatherer answers
        all requests, and nobody else waits for that.
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
        """Wait for the response to the request, and have the store use the copy that it is."""
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

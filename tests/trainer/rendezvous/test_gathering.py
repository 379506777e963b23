"""Nodes of a large job that start together are joined by one of them, and by themselves where that
one fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)

from kdist_trainer.rendezvous import many_nodes
from kdist_trainer.rendezvous.configmap_client import Copy
from kdist_trainer.rendezvous.exchange import ExchangeServer, JoinRequest
from kdist_trainer.rendezvous.handler import pick_port
from kdist_trainer.rendezvous.many_nodes import Gatherer, Gathering
from kdist_trainer.rendezvous.state import RendezvousState, RendezvousTimings
from kdist_trainer.rendezvous.stores import KubernetesStore
from kdist_trainer.rendezvous.torch_internals import Node
from tests.patience import soon
from tests.trainer.rendezvous.api_server import ApiServer
from tests.trainer.rendezvous.keys import KEY

SIZE = 16
NODES = [Node("127.0.0.1", index, 0) for index in range(SIZE)]
Open = Callable[[int], RendezvousState]


@pytest.fixture
def open_state(api: ApiServer) -> Iterator[Open]:
    """Opens the state of node number so and so, which shall have as many as `SIZE`."""
    servers: list[ExchangeServer] = []

    def opening(index: int) -> RendezvousState:
        servers.append(ExchangeServer("127.0.0.1", key=KEY, nodes=lambda: 128))
        store = KubernetesStore(
            api.config_map(), run_id="run", timeout_seconds=20, poll_seconds=0.02
        )
        settings = RendezvousSettings(
            "run", SIZE, SIZE, RendezvousTimeout(), timedelta(seconds=5), 3
        )
        timings = RendezvousTimings.for_nodes(SIZE, remote=True)
        state = RendezvousState(C10dRendezvousBackend(store, "run"), settings, timings)
        state.node = NODES[index]
        state.gathering = Gathering(NODES[index], servers[-1], store)
        state.sync()
        return state

    yield opening
    for server in servers:
        server.close()


def join(state: RendezvousState) -> bool | None:
    """What torch does to join, once."""
    assert state.node is not None
    state.add_participant(state.node)
    return state.sync()


def gatherer_of(state: RendezvousState) -> Gatherer:
    named = Gatherer.named_in(state.state, KEY)
    assert named is not None
    return named


def ask(gatherer: RendezvousState, nodes: list[Node]) -> list[JoinRequest]:
    """Requests of these nodes, that have all arrived."""
    requests = [JoinRequest(gatherer_of(gatherer), node) for node in nodes]
    assert gatherer.gathering is not None
    newcomers = gatherer.gathering.newcomers
    assert soon(lambda: set(newcomers(gatherer.state)) == set(nodes))
    return requests


def writes(api: ApiServer) -> int:
    return sum(method == "PUT" for method, _ in api.requests)


@contextmanager
def polling(state: RendezvousState) -> Iterator[None]:
    """A node polls meanwhile, as torch has it do."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            state.pause()
            state.sync()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.sampled
def test_all_that_ask_are_joined_in_one_write_and_get_the_complete_state(
    api: ApiServer, open_state: Open
) -> None:
    gatherer = open_state(0)
    assert join(gatherer)
    requests = ask(gatherer, NODES[1:])
    before = writes(api)
    gatherer.pause()
    assert gatherer.sync()
    assert writes(api) == before + 1
    assert gatherer.state.complete
    assert gatherer.state.participants == {node: rank for rank, node in enumerate(NODES)}
    for request in requests:
        response = request.wait(20)
        assert response is not None
        assert (
            Copy.from_json(response).document["metadata"]["resourceVersion"]
            == (api.document["metadata"]["resourceVersion"])
        )
        request.close()


def test_a_node_is_joined_without_a_write_of_its_own_and_hears_that_the_round_is_complete(
    api: ApiServer, open_state: Open
) -> None:
    gatherer, other = open_state(0), open_state(1)
    assert join(gatherer)
    other.expire()
    other.sync()
    requests = ask(gatherer, NODES[2:])
    reads = other.gathering._store.config_map.requests  # type: ignore[union-attr]
    with polling(gatherer):
        assert join(other) is None
    assert other.state.complete
    assert other.state.participants.keys() == set(NODES)
    assert other.gathering._store.config_map.requests == reads  # type: ignore[union-attr]
    for request in requests:
        request.close()


def test_a_node_that_has_withdrawn_its_request_is_not_joined(open_state: Open) -> None:
    gatherer = open_state(0)
    assert join(gatherer)
    gone, here = ask(gatherer, NODES[1:3])
    gone.close()
    assert gatherer.gathering is not None
    newcomers = gatherer.gathering.newcomers
    assert soon(lambda: newcomers(gatherer.state) == [NODES[2]])
    assert gatherer.sync()
    assert gatherer.state.participants.keys() == {NODES[0], NODES[2]}
    here.close()


@pytest.mark.sampled
def test_a_node_joins_by_itself_in_the_place_of_a_gatherer_that_has_ended(open_state: Open) -> None:
    first, lost, second = open_state(0), open_state(1), open_state(2)
    assert join(first)
    first.add_participant(NODES[1])
    Gatherer(0, "127.0.0.1", pick_port(), "of-nobody", NODES[1].pid).name_in(first.state)
    first.mark_dirty()
    assert first.sync()
    second.expire()
    second.sync()
    assert join(second)
    assert second.state.participants.keys() == {NODES[0], NODES[2]}
    assert gatherer_of(second).is_node(NODES[2])
    lost.expire()
    lost.sync()
    with polling(second):  # it lives after all
        assert join(lost) is None
    assert lost.state.participants.keys() == {NODES[0], NODES[1], NODES[2]}


def test_a_node_joins_by_itself_if_the_gatherer_lives_and_does_not_join_it(
    open_state: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_nodes, "_ANSWER_SECONDS", 0.05)
    idle, other = open_state(0), open_state(1)
    assert join(idle)
    other.expire()
    other.sync()
    assert soon(lambda: join(other)), "the gatherer is asked some times"
    assert other.state.participants.keys() == {NODES[0], NODES[1]}
    assert gatherer_of(other) != gatherer_of(idle)


def test_a_gatherer_that_leaves_the_round_sends_the_others_away(open_state: Open) -> None:
    gatherer, other = open_state(0), open_state(1)
    assert join(gatherer)
    other.expire()
    other.sync()
    (request,) = ask(gatherer, NODES[2:3])
    gatherer.end_gathering()
    with pytest.raises(OSError, match="ended the connection"):
        request.wait(20)
    request.close()
    assert join(other)
    assert other.state.participants.keys() == {NODES[1]}


@pytest.mark.sampled
def test_of_two_nodes_that_are_first_at_once_one_is_the_gatherer_and_joins_the_other(
    open_state: Open,
) -> None:
    first, second = open_state(0), open_state(1)
    assert join(first)
    assert join(second) is False, "it has read the state before the other joined"
    with polling(first):
        assert join(second) is None
        assert soon(lambda: NODES[1] in second.state.participants or join(second))
    assert gatherer_of(first) == gatherer_of(second)
    assert second.state.participants.keys() == {NODES[0], NODES[1]}

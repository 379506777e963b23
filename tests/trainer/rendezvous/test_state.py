"""The shared state in large jobs: how often it is polled, and which write names the host of the
exchange.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)

from kdist_trainer.rendezvous.exchange import ExchangeHost
from kdist_trainer.rendezvous.state import RendezvousState, RendezvousTimings, name_key
from kdist_trainer.rendezvous.torch_internals import Node
from kdist_trainer.torch_internals import HashStore
from tests.trainer.rendezvous.keys import KEY

NODES = [Node("10.0.0.1", index, 0) for index in range(64)]


def open_state(store: HashStore, node: Node, *, nodes: int = 64) -> RendezvousState:
    settings = RendezvousSettings("run", 1, nodes, RendezvousTimeout(), timedelta(seconds=5), 3)
    timings = RendezvousTimings.for_nodes(nodes, remote=True)
    state = RendezvousState(C10dRendezvousBackend(store, "run"), settings, timings)
    state.node = node
    state.key = KEY
    state.offer_host = lambda number, rank: ExchangeHost.from_public(
        (number, node.addr, 7, f"of-{node.pid}", rank), KEY
    )
    state.sync()
    return state


def write(state: RendezvousState) -> bool | None:
    state.mark_dirty()
    return state.sync()


def test_a_round_that_lacks_many_nodes_is_polled_less_often_than_one_that_lacks_few() -> None:
    state = open_state(HashStore(), NODES[0])
    state.state.participants = dict.fromkeys(NODES[:4], 0)
    early = state.poll_seconds()
    state.state.participants = dict.fromkeys(NODES[:60], 0)
    late = state.poll_seconds()
    assert early > late == state.timings.poll
    state.state.participants = dict.fromkeys(NODES[:4], 0)
    state.state.complete = True
    assert state.poll_seconds() == state.timings.poll, "nobody joins a complete round"


def test_the_write_that_completes_a_round_names_its_host_and_no_other_write_does() -> None:
    store = HashStore()
    first, second = open_state(store, NODES[0], nodes=2), open_state(store, NODES[1], nodes=2)
    first.state.participants = {NODES[0]: 0}
    assert write(first)
    assert ExchangeHost.named_in(first.state, KEY) is None
    second.expire()
    second.sync()
    second.state.participants[NODES[1]] = 1
    second.state.complete = True
    assert write(second)
    first.expire()
    first.sync()
    host = ExchangeHost.named_in(first.state, KEY)
    assert host is not None
    assert host.nonce == "of-1"
    assert write(first), "a keep-alive"
    assert ExchangeHost.named_in(first.state, KEY) == host
    first.state.round += 1
    assert ExchangeHost.named_in(first.state, KEY) is None, "the next round has a host of its own"


def test_a_round_that_was_completed_without_a_host_does_not_get_one_later() -> None:
    store = HashStore()
    state = open_state(store, NODES[0], nodes=1)
    offer, state.offer_host = state.offer_host, lambda *_: None
    state.state.participants = {NODES[0]: 0}
    state.state.complete = True
    assert write(state)
    state.offer_host = offer
    assert write(state)
    assert ExchangeHost.named_in(state.state, KEY) is None, (
        "others exchange through the store already"
    )


def test_of_two_nodes_that_complete_a_round_at_once_one_is_the_host() -> None:
    store = HashStore()
    states = [open_state(store, node, nodes=2) for node in NODES[:2]]
    for state in states:
        state.state.participants = {NODES[0]: 0, NODES[1]: 1}
        for node in NODES[:2]:
            name_key(state.state, node, KEY)
        state.state.complete = True
    assert [write(state) for state in states] == [True, False]
    for state in states:
        state.expire()
        state.sync()
    assert {ExchangeHost.named_in(state.state, KEY) for state in states} == {
        ExchangeHost.from_public((0, NODES[0].addr, 7, "of-0", 0), KEY)
    }

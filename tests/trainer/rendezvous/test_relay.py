"""While workers run, one agent reads the ConfigMap for all; each agent goes on alone without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousInfo

from kdist_trainer.rendezvous.configmap_client import Copy
from kdist_trainer.rendezvous.handler import Rendezvous, open_rendezvous
from kdist_trainer.rendezvous.stores import KubernetesStore
from tests import patience
from tests.trainer.rendezvous.api_server import ApiServer


def soon(condition: Callable[[], object]) -> bool:
    """Whether it comes true: a silent node is noticed after some missed keep-alives."""
    return patience.soon(condition, seconds=20.0)


@dataclass
class Agent:
    """An agent's rendezvous, with a client of its own."""

    store: KubernetesStore
    rendezvous: Rendezvous
    info: RendezvousInfo | None = None

    @property
    def requests(self) -> int:
        return self.store.config_map.requests

    @property
    def is_host(self) -> bool:
        exchange = self.rendezvous.exchange
        return exchange is not None and self.rendezvous._server.is_host(exchange.host)

    def keep_alive_of(self, other: Agent) -> datetime | None:
        self.rendezvous.status()
        state = self.rendezvous._state_holder.state
        return state.last_heartbeats.get(other.rendezvous.node)

    def join(self) -> None:
        with self.rendezvous.watching_departures():
            self.info = self.rendezvous.next_rendezvous()


def open_agent(api: ApiServer, index: int, size: int, *, address: str = "127.0.0.1") -> Agent:
    store = KubernetesStore(api.config_map(), run_id="run", timeout_seconds=20, poll_seconds=0.02)
    rendezvous = open_rendezvous(
        store,
        run_id="run",
        min_nodes=size,
        max_nodes=size,
        address=address,
        index=index,
        timeout_seconds=60,
        remote=True,
        exchange_seconds=20,
    )
    return Agent(store, rendezvous)


def meet(agents: list[Agent]) -> None:
    threads = [threading.Thread(target=agent.join) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.fixture
def agents(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    """Three agents of one round, the host first."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # all share this process
    agents = [open_agent(api, index, 3) for index in range(3)]
    meet(agents)
    yield sorted(agents, key=lambda agent: not agent.is_host)
    for agent in agents:
        agent.rendezvous.leave()
        agent.rendezvous._server.close()


def rests(host: Agent, members: list[Agent], *, during: Callable[[], object]) -> Callable[[], bool]:
    """A condition: the host makes several requests, while `during` is called again and again, and
    the members none.
    """

    def quiet() -> bool:
        before, until = [member.requests for member in members], host.requests + 4
        while host.requests < until:
            during()
        return [member.requests for member in members] == before

    return quiet


def test_one_agent_asks_the_api_server_for_all_and_all_see_the_same(agents: list[Agent]) -> None:
    host, *members = agents
    assert [agent.is_host for agent in agents] == [True, False, False]

    def poll() -> None:
        for agent in agents:
            status = agent.rendezvous.status()
            assert (status.left, status.silent, status.closed) == (0, 0, False)

    assert soon(rests(host, members, during=poll))
    members[0].rendezvous.leave()
    assert soon(lambda: members[1].rendezvous.status().left == 1)


@pytest.mark.sampled
def test_the_host_commits_the_keep_alives_of_all_and_of_nobody_who_sends_none(
    agents: list[Agent],
) -> None:
    host, alive, silent = agents
    before = host.keep_alive_of(alive)
    assert before is not None
    assert soon(rests(host, [alive, silent], during=lambda: None))
    assert soon(lambda: (host.keep_alive_of(alive) or before) > before)
    silent.rendezvous._stop_heartbeats()
    silent.rendezvous._stop_relay()
    assert soon(lambda: alive.rendezvous.status().silent == 1)
    assert soon(lambda: host.rendezvous.status().silent == 1)


def asks_and_stays_alive(agent: Agent, *, seen_by: Agent) -> None:
    asked, before = agent.requests, seen_by.keep_alive_of(agent)
    assert before is not None
    assert soon(lambda: agent.rendezvous.status() and agent.requests > asked)
    assert soon(lambda: (seen_by.keep_alive_of(agent) or before) > before)


@pytest.mark.sampled
def test_without_the_host_each_agent_asks_for_itself_and_stays_alive(agents: list[Agent]) -> None:
    host, first, second = agents
    assert soon(rests(host, [first, second], during=lambda: None))
    host.rendezvous._stop_heartbeats()
    host.rendezvous._stop_relay()
    for here, there in ((first, second), (second, first)):
        asks_and_stays_alive(here, seen_by=there)
    assert soon(lambda: first.rendezvous.status().silent == 1)


def test_agents_that_lose_their_host_form_the_next_round_around_another(
    agents: list[Agent], api: ApiServer
) -> None:
    host, *others = agents
    first = host.rendezvous.exchange
    assert first is not None
    host.rendezvous.leave()
    host.rendezvous._server.close()
    meet([*others, replaced := open_agent(api, 7, 3)])
    again = [agent.rendezvous.exchange for agent in (*others, replaced)]
    hosts = {exchange.host for exchange in again if exchange is not None}
    assert len(hosts) == 1
    (second,) = hosts
    assert second.round > first.host.round
    assert (second.port, second.token) != (first.host.port, first.host.token)
    assert sorted(agent.info.rank for agent in (*others, replaced) if agent.info) == [0, 1, 2]
    replaced.rendezvous.leave()
    replaced.rendezvous._server.close()


def test_a_host_that_cannot_listen_leaves_the_exchange_in_the_config_map(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    agents = [open_agent(api, index, 2) for index in range(2)]
    for agent in agents:
        agent.rendezvous._state_holder.offer_host = lambda *_: None
    meet(agents)
    assert [agent.rendezvous.exchange for agent in agents] == [None, None]
    assert {agent.info.world_size for agent in agents if agent.info} == {2}
    assert any("MASTER_5fADDR" in key for key in api.document["binaryData"])
    for agent in agents:
        agent.rendezvous.leave()


def test_what_agents_exchange_is_not_in_the_config_map(agents: list[Agent], api: ApiServer) -> None:
    assert not [key for key in api.document["binaryData"] if "MASTER" in key]
    for agent in agents:
        assert agent.info is not None
        agent.info.store.set(f"agent/{agent.info.rank}", "here")
    assert agents[0].info is not None
    assert agents[0].info.store.multi_get([f"agent/{rank}" for rank in range(3)]) == [b"here"] * 3
    assert not [key for key in api.document["binaryData"] if "agent" in key]


def test_a_copy_of_another_agent_never_hides_what_this_one_has_written(api: ApiServer) -> None:
    ours, theirs = (
        KubernetesStore(api.config_map(), run_id="run", timeout_seconds=5, poll_seconds=0.02)
        for _ in range(2)
    )
    theirs.set("key", "old")
    old = Copy.from_json(theirs.fetch().to_json())
    assert old.values == theirs.fetch().values
    ours.set("key", "new")
    ours.offer(old)
    assert ours.get("key") == b"new"
    theirs.offer(ours.fetch())
    assert theirs.get("key") == b"new"


def test_a_change_that_an_old_copy_led_to_is_made_on_what_is_there_now(api: ApiServer) -> None:
    ours, theirs = (
        KubernetesStore(api.config_map(), run_id="run", timeout_seconds=5, poll_seconds=0.02)
        for _ in range(2)
    )
    ours.add("n", 1)
    old = replace(ours.fetch())
    theirs.add("n", 1)
    ours.offer(old)
    assert ours.add("n", 1) == 3
    ours.offer(old)
    assert ours.compare_set("n", "1", "one") == b"3", "the old value is not there any more"


@pytest.mark.sampled
def test_an_agent_says_which_others_it_hears_while_it_works_and_while_it_waits(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    addresses = [f"127.0.0.{2 + index}" for index in range(3)]
    agents = [open_agent(api, index, 3, address=each) for index, each in enumerate(addresses)]
    assert agents[0].rendezvous.peers() is None, "it has not read the rendezvous yet"

    def hears(agent: Agent, heard: list[str]) -> bool:
        known = agent.rendezvous.peers()
        return known is not None and sorted(known.heard) == heard

    meet(agents)
    survivor, silent = (agent for agent in agents if not agent.is_host)
    left = sorted({*addresses} - {silent.rendezvous.node.addr})
    assert soon(lambda: survivor.rendezvous.status() and hears(survivor, addresses))
    silent.rendezvous._stop_heartbeats()
    silent.rendezvous._stop_relay()
    assert soon(lambda: survivor.rendezvous.status() and hears(survivor, left))

    survivor.rendezvous.leave()

    def wait() -> None:
        with suppress(RendezvousError):
            survivor.rendezvous.next_rendezvous()

    waiting = threading.Thread(target=wait)
    waiting.start()
    before = survivor.rendezvous.peers()
    assert before is not None

    def waits_without_it() -> bool:
        known = survivor.rendezvous.peers()
        return known is not None and known.read_at > before.read_at and hears(survivor, left)

    assert soon(waits_without_it)
    assert waiting.is_alive()
    agents[0].rendezvous.set_closed()
    waiting.join(60)
    for agent in agents:
        agent.rendezvous.leave()
        agent.rendezvous._server.close()

"""Agents in processes of their own that form one generation after another, without ranks. One of
them kills itself at a given point.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous.api import RendezvousError

from kdist_trainer.agent.coordination import AgentStore
from kdist_trainer.rendezvous import state
from kdist_trainer.rendezvous.configmap_client import ApiEndpoint, ConfigMap
from kdist_trainer.rendezvous.exchange import ExchangeHost
from kdist_trainer.rendezvous.handler import Rendezvous, open_rendezvous
from kdist_trainer.rendezvous.many_nodes import Gatherer, Gathering
from kdist_trainer.rendezvous.state import RendezvousTimings
from kdist_trainer.rendezvous.stores import KubernetesStore
from kdist_trainer.rendezvous.torch_internals import Node

POINTS = ("listening", "committed", "exchanging", "numbered", "working")
"""When the host is killed: it listens and has not named itself yet; it is named and nobody has
reached it; others wait for its key; its generation has a number that the others do not know; all
know the number.
"""
GATHERING_POINTS = ("asked", "gathered")
"""When the gatherer of a round is killed: others have asked it and are not added; the round is
complete and nobody knows it yet.
"""
MEMBER_POINTS = ("informed", "connected", "leaving")
"""When a member that is not the host is killed: it has read that the round is complete, and has no
connection yet; the others wait for its keys; it has just left the round.
"""
_SECONDS = 20.0
_PAUSE = 0.1


@dataclass(frozen=True)
class Job:
    """What all members have in common."""

    server: ApiEndpoint
    namespace: str
    name: str
    folder: Path
    size: int
    point: str
    run_id: str
    gathers: bool = False
    """Whether nodes join together, as in a large job."""
    keep_alive: float | None = None
    """The interval of keep-alives in seconds, if it is not the usual one."""

    def kill_at(
        self, point: str, *, suitable: bool = True, first: Callable[[], object] = lambda: None
    ) -> None:
        """Kill this process, after a call of `first`, if the job's point is this one and no process
        was killed before.
        """
        if point == self.point and suitable:
            try:
                (self.folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                return
            first()
            os.kill(os.getpid(), signal.SIGKILL)


def be_member(job: Job, index: int) -> None:
    """Form generations until there is a file `end`, and record each."""
    if job.gathers:
        vars(state)["MOST_SINGLE"] = 1
    if job.keep_alive is not None:
        usual = RendezvousTimings.for_nodes(job.size, remote=True)
        changed = replace(usual, keep_alive=job.keep_alive)
        RendezvousTimings.for_nodes = lambda *_, **__: changed  # type: ignore[method-assign]
    config_map = ConfigMap(job.server, job.namespace, job.name, retry_seconds=lambda: _SECONDS)
    store = KubernetesStore(
        config_map, run_id=job.run_id, timeout_seconds=_SECONDS, poll_seconds=_PAUSE
    )
    handler = open_rendezvous(
        store,
        run_id=job.run_id,
        min_nodes=job.size - 1,
        max_nodes=job.size,
        address="127.0.0.1",
        index=index,
        timeout_seconds=120,
        remote=True,
        exchange_seconds=job.keep_alive or _SECONDS,
    )
    _watch_host(job, handler)
    _watch_gathering(job, handler._state_holder.gathering)
    agents = AgentStore(store, run_id=job.run_id, node=f"node-{index}")
    while not (job.folder / "end").exists():
        try:
            _form_generation(job, handler, agents, index)
            while not (job.folder / "end").exists():
                status = handler.status()
                if status.left or status.silent:
                    break
                time.sleep(_PAUSE)
        except (RendezvousError, DistError):
            time.sleep(_PAUSE)


def _form_generation(job: Job, handler: Rendezvous, agents: AgentStore, index: int) -> None:
    with handler.watching_departures():
        info = handler.next_rendezvous()
        number, nodes = _agree(job, handler, agents, info, index)
    line = json.dumps({"index": index, "number": number, "nodes": nodes})
    with (job.folder / f"{index}.jsonl").open("a") as file:
        file.write(line + "\n")
    job.kill_at("working", suitable=_is_host(handler))


def _agree(
    job: Job, handler: Rendezvous, agents: AgentStore, info: Any, index: int
) -> tuple[int, list[str]]:
    """The number and the nodes of the generation, decided by rank 0 as in an agent."""
    store: Store = info.store
    job.kill_at("connected", suitable=not _is_host(handler))
    job.kill_at("leaving", suitable=not _is_host(handler), first=handler.leave)
    store.set(f"agent/{info.rank}", f"node-{index}")
    job.kill_at("exchanging", suitable=_is_host(handler))
    if info.rank == 0:
        nodes = sorted(store.get(f"agent/{rank}").decode() for rank in range(info.world_size))
        number = agents.last_generation() + 1
        agents.open_generation(number, dict.fromkeys(nodes, "incarnation"))
        job.kill_at("numbered")
        store.set("generation", json.dumps([number, nodes]))
    number, nodes = json.loads(store.get("generation"))
    return number, nodes


def _watch_host(job: Job, handler: Rendezvous) -> None:
    """Have the process killed at the points within the rendezvous."""
    offer, exchange_store = handler._server.offer, handler.exchange_store

    def offer_and_die(number: int, rank: int) -> ExchangeHost | None:
        host = offer(number, rank)
        job.kill_at("listening")
        return host

    def die_or_connect(store: Store) -> Store:
        host = ExchangeHost.named_in(handler._state_holder.state, handler._server.key)
        is_host = host is not None and handler._server.is_host(host)
        job.kill_at("committed", suitable=is_host)
        job.kill_at("informed", suitable=not is_host)
        return exchange_store(store)

    handler._state_holder.offer_host = offer_and_die
    vars(handler)["exchange_store"] = die_or_connect


def _watch_gathering(job: Job, gathering: Gathering | None) -> None:
    """Have the process killed at the points of the gatherer."""
    if gathering is None:
        return
    newcomers, follow = gathering.newcomers, gathering.follow

    def find_and_die(state: Any) -> list[Node]:
        found = newcomers(state)
        job.kill_at("asked", suitable=bool(found))
        return found

    def follow_and_die(state: Any) -> None:
        is_gatherer = (
            gathering._own is not None
            and Gatherer.named_in(state, gathering._server.key) == gathering._own
        )
        job.kill_at("gathered", suitable=is_gatherer and state.complete)
        follow(state)

    vars(gathering).update(newcomers=find_and_die, follow=follow_and_die)


def _is_host(handler: Rendezvous) -> bool:
    exchange = handler.exchange
    return exchange is not None and handler._server.is_host(exchange.host)

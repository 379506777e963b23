"""How long a job's agents take to meet in a ConfigMap, and what they ask of the API server
meanwhile and afterwards.

    python -m bench.rendezvous [NODES]...

Each agent is a process that does what an agent does around one group: join the round, publish
its ranks, agree, then poll and send keep-alives. The API server and etcd are real and run next to
them, so all share this machine's cores. For comparison the same over torch's TCPStore, which one of
the agents would have to keep.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from bench.table import title
from kdist_trainer.agent.coordination import AgentStore
from kdist_trainer.agent.rendezvous_poller import PollResult, RendezvousPoller
from kdist_trainer.rendezvous.configmap_client import ConfigMap
from kdist_trainer.rendezvous.handler import RendezvousTimings, open_rendezvous
from kdist_trainer.rendezvous.kubernetes_store import KubernetesStore
from kdist_trainer.torch_internals import TCPStore
from tests.trainer.rendezvous.control_plane import ControlPlane

SIZES = (2, 8, 64)
WORK_SECONDS = 20.0
_WORD_SECONDS = 120.0


def main() -> None:
    """Measure and print."""
    title(f"Rendezvous: nodes that start together, then work for {WORK_SECONDS:.0f} s")
    print(
        f"  {'':24} {'nodes':>5} {'formed':>8} {'requests per agent':>20} "
        f"{'at work, per agent':>20} {'at work, all':>14}"
    )
    with tempfile.TemporaryDirectory() as folder, ControlPlane(Path(folder)) as plane:
        for nodes in map(int, sys.argv[1:] or SIZES):
            show("torch's TCPStore", nodes, measure(nodes, None))
            show("one ConfigMap", nodes, measure(nodes, plane))


def show(name: str, nodes: int, agents: list[dict[str, float]]) -> None:
    """One line: the last agent's time, and requests."""
    formed = max(agent["formed"] for agent in agents)
    joining = sum(agent["joining"] for agent in agents) / nodes
    working = sum(agent["working"] for agent in agents) / WORK_SECONDS
    print(
        f"  {name:24} {nodes:5} {formed:6.2f} s {joining:20.1f} {working / nodes:18.2f}/s "
        f"{working:12.1f}/s"
    )


def measure(nodes: int, plane: ControlPlane | None) -> list[dict[str, float]]:
    """What each of so many agents measured."""
    fork = multiprocessing.get_context("fork")  # so that sixty-four processes hold torch once
    barrier, answers = fork.Barrier(nodes), fork.Queue()
    server = (
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if plane is None else None
    )
    run_id = f"bench-{nodes}-{os.getpid()}-{time.time_ns()}"

    def opening() -> tuple[Store, ConfigMap | None]:
        if plane is None or server is not None:
            assert server is not None
            return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), None
        config_map = plane.config_map(retry_seconds=60.0)
        poll = RendezvousTimings.for_nodes(nodes, remote=True).poll
        return KubernetesStore(
            config_map, run_id=run_id, timeout_seconds=_WORD_SECONDS, poll_seconds=poll
        ), config_map

    arguments = (opening, nodes, run_id, barrier, answers)
    agents = [fork.Process(target=be_agent, args=arguments, daemon=True) for _ in range(nodes)]
    for agent in agents:
        agent.start()
    found = [answers.get(timeout=300) for _ in agents]
    for agent in agents:
        agent.join()
    return found


def be_agent(
    opening: Callable[[], tuple[Store, ConfigMap | None]],
    nodes: int,
    run_id: str,
    barrier: Barrier,
    answers: Any,
) -> None:
    """One agent's part, in a process of its own."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.disable()  # torch warns of each sign of life that comes late
    store, config_map = opening()
    barrier.wait()
    began = time.monotonic()
    handler = open_rendezvous(
        store,
        run_id=run_id,
        min_nodes=nodes,
        max_nodes=nodes,
        address="127.0.0.1",
        index=0,
        timeout_seconds=300,
        remote=config_map is not None,
    )
    info = handler.next_rendezvous()
    agree(info.store, info.rank, nodes)
    formed = time.monotonic() - began
    joining = config_map.requests if config_map else 0
    agent_store = AgentStore(store, run_id=run_id, node="")
    with RendezvousPoller(
        lambda: PollResult(handler.status(), agent_store.generation(1)),
        seconds=handler.timings.watch,
    ):
        time.sleep(WORK_SECONDS)
    working = (config_map.requests if config_map else 0) - joining
    answers.put({"formed": formed, "joining": joining, "working": working})
    barrier.wait()  # an agent that leaves is news for the others
    handler._stop_heartbeats()


def agree(store: Any, rank: int, nodes: int) -> None:
    """What torch's agent and ours exchange before the ranks start: who has which ranks, and
    which generation it is.
    """
    keys = [
        [f"{prefix}/{number}" for number in range(nodes)]
        for prefix in ("role_info", "assigned", "agent")
    ]
    store.set(keys[0][rank], json.dumps({"rank": rank, "local_world_size": 8}))
    if rank == 0:
        store.multi_get(keys[0])
        store.multi_set(keys[1], [json.dumps([number, 8, 8 * nodes]) for number in range(nodes)])
    store.get(keys[1][rank])
    store.set(keys[2][rank], json.dumps([f"node-{rank}", "incarnation"]))
    if rank == 0:
        for key in keys[2]:
            store.get(key)
        store.set("generation", "1")
    store.get("generation")


if __name__ == "__main__":
    main()

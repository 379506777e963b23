"""How long a job's agents take to meet in a ConfigMap, and what they ask of the API server
meanwhile and afterwards.

    python -m bench.rendezvous [--no-tcp] [NODES]...

Each agent is light: a fork of this process, which has loaded torch, so 256 of them fit into a small
machine. It does what an agent does around one group: join the round, publish its ranks, agree, then
poll and send keep-alives. The API server and etcd are real and run next to them, so all share this
machine's cores. For comparison the same over torch's TCPStore, which one of the agents would have
to keep; `--no-tcp` leaves it out.
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
from queue import Empty
from typing import Any

from torch.distributed.distributed_c10d import Store

from bench.table import title
from kdist_trainer.agent.coordination import AgentStore
from kdist_trainer.agent.monitor import PollResult, RendezvousPoller
from kdist_trainer.rendezvous.configmap_client import ConfigMap
from kdist_trainer.rendezvous.handler import open_rendezvous
from kdist_trainer.rendezvous.state import RendezvousTimings
from kdist_trainer.rendezvous.stores import KubernetesStore
from kdist_trainer.torch_internals import TCPStore
from tests.trainer.rendezvous.control_plane import ControlPlane

SIZES = (2, 8, 64, 256)
WORK_SECONDS = 20.0
_WORD_SECONDS = 120.0
_NO_TCP = "--no-tcp"


def main() -> None:
    """Measure and print."""
    title(f"Rendezvous: nodes that start together, then work for {WORK_SECONDS:.0f} s")
    print(
        f"  {'':18} {'nodes':>5} {'joined':>9} {'formed':>9} {'CPU':>9} {'requests each':>14} "
        f"{'at work, each':>14} {'all':>9}"
    )
    words = sys.argv[1:]
    sizes = [int(word) for word in words if word != _NO_TCP] or SIZES
    with tempfile.TemporaryDirectory() as folder, ControlPlane(Path(folder)) as plane:
        for nodes in sizes:
            if _NO_TCP not in words:
                show("torch's TCPStore", nodes, measure(nodes, None))
            show("one ConfigMap", nodes, measure(nodes, plane))


def show(name: str, nodes: int, agents: list[dict[str, float]]) -> None:
    """One line: the last agent's time, the time of the agents' processors, and requests."""
    joined, formed = (max(agent[name] for agent in agents) for name in ("joined", "formed"))
    busy = sum(agent["busy"] for agent in agents)
    joining = sum(agent["joining"] for agent in agents) / nodes
    working = sum(agent["working"] for agent in agents) / WORK_SECONDS
    print(
        f"  {name:18} {nodes:5} {joined:7.2f} s {formed:7.2f} s {busy:7.1f} s {joining:14.1f} "
        f"{working / nodes:12.2f}/s {working:7.1f}/s",
        flush=True,  # the next agents are forks
    )


def measure(nodes: int, plane: ControlPlane | None) -> list[dict[str, float]]:
    """What each of so many agents measured."""
    fork = multiprocessing.get_context("fork")  # so that all processes hold torch once
    barrier, answers = fork.Barrier(nodes), fork.Queue()
    port, is_ready = fork.Value("i", 0), fork.Event()
    run_id = f"bench-{nodes}-{os.getpid()}-{time.time_ns()}"

    def opening() -> tuple[Store, ConfigMap | None]:
        is_ready.wait()
        if plane is None:
            return TCPStore("127.0.0.1", port.value, is_master=False, wait_for_workers=False), None
        config_map = plane.config_map(retry_seconds=60.0)
        poll = RendezvousTimings.for_nodes(nodes, remote=True).poll
        return KubernetesStore(
            config_map, run_id=run_id, timeout_seconds=_WORD_SECONDS, poll_seconds=poll
        ), config_map

    arguments = (opening, nodes, run_id, barrier, answers)
    agents = [fork.Process(target=be_agent, args=arguments, daemon=True) for _ in range(nodes)]
    for agent in agents:
        agent.start()
    if plane is None:  # after the forks, which would copy locks that the server's thread holds
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.value = server.port
    is_ready.set()
    found: list[dict[str, float]] = []
    while len(found) < nodes:
        try:
            found.append(answers.get(timeout=1))
        except Empty:
            if any(agent.exitcode for agent in agents):
                barrier.abort()
                raise SystemExit("an agent failed") from None
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
    began, busy = time.monotonic(), time.process_time()
    handler = open_rendezvous(
        store,
        run_id=run_id,
        min_nodes=nodes,
        max_nodes=nodes,
        address="127.0.0.1",
        index=0,
        timeout_seconds=300,
        remote=config_map is not None,
        exchange_seconds=None if config_map is None else _WORD_SECONDS,
    )
    with handler.watching_departures():
        info = handler.next_rendezvous()
        joined = time.monotonic() - began
        agree(info.store, info.rank, nodes)
    formed, busy = time.monotonic() - began, time.process_time() - busy
    joining = config_map.requests if config_map else 0
    agent_store = AgentStore(store, run_id=run_id, node="")
    with RendezvousPoller(
        lambda: PollResult(handler.status(), agent_store.generation(1)),
        seconds=handler.timings.watch,
    ):
        time.sleep(WORK_SECONDS)
    working = (config_map.requests if config_map else 0) - joining
    figures = {"joined": joined, "formed": formed, "busy": busy}
    answers.put({**figures, "joining": joining, "working": working})
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

"""Agents that meet in a ConfigMap of a real API server: they are lost, it is lost, and the group
forms again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.lab import Lab, descendants, kill
from tests.trainer.rendezvous.control_plane import NAME, NAMESPACE, ControlPlane

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


class Cluster(Lab):
    """A lab whose agents meet in the ConfigMap of `plane`."""

    def __init__(self, folder: Path, plane: ControlPlane, *, run_id: str, **job: Any) -> None:
        super().__init__(folder, rendezvous=f"kubernetes:{NAMESPACE}/{NAME}", run_id=run_id, **job)
        self.plane = plane

    def start(self, *nodes: str, run_id: str | None = None, **environment: str) -> None:
        super().start(*nodes, run_id=run_id, **self.plane.environment(), **environment)

    def lose(self, node: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Kill or stop an agent with all that it started; returns when."""
        agent = self.agents[node].pid
        for pid in [*descendants(agent), agent]:
            kill(pid, number)
        return time.monotonic()


@pytest.mark.sampled
def test_three_agents_meet_lose_one_go_on_smaller_and_take_it_back(
    tmp_path: Path, plane: ControlPlane
) -> None:
    with Cluster(tmp_path, plane, run_id="loss", nodes={"min": 2, "max": 3}) as lab:
        lab.start("node-0", "node-1", "node-2")
        lab.stepping(1, world=3)
        lab.lose("node-0")
        lab.stepping(2, world=2, steps=1)
        assert [one["cause"] for one in lab.ledger("failure")] == ["node_lost"]
        lab.start("node-0")
        lab.stepping(3, world=3)
        lab.tell("finish")
        assert [lab.end(node) for node in ("node-0", "node-1", "node-2")] == [0, 0, 0]


@pytest.mark.sampled
def test_a_node_that_falls_silent_is_left_behind_though_no_connection_is_cut(
    tmp_path: Path, plane: ControlPlane
) -> None:
    with Cluster(tmp_path, plane, run_id="silence", nodes={"min": 1, "max": 2}) as lab:
        lab.start("node-0", "node-1")
        lab.stepping(1, world=2)
        lost_at = lab.lose("node-1", signal.SIGSTOP)
        lab.stepping(2, world=1, steps=1)
        assert time.monotonic() - lost_at < 110, "the collective's own time-out would be 120 s"
        assert lab.events("node-0", "node-lost")
        lab.lose("node-1")
        lab.tell("finish")
        assert lab.end("node-0") == 0


@pytest.mark.sampled
def test_an_api_server_away_for_a_while_disturbs_nobody(
    tmp_path: Path, plane: ControlPlane
) -> None:
    with Cluster(tmp_path, plane, run_id="outage", nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1")
        lab.stepping(1, world=2)
        plane.stop()
        lab.wait(lambda: lab.events("node-0", "rendezvous-unreachable"), "that node-0 notices")
        step = lab.ranks(1)[0]["step"]
        time.sleep(12)  # many keep-alives are missed
        plane.start()
        lab.stepping(1, world=2, steps=step + 100)
        lab.tell("finish")
        assert [lab.end(node) for node in ("node-0", "node-1")] == [0, 0]
        assert not lab.events("node-0", "restarting") + lab.events("node-1", "restarting")
        assert len(lab.ledger("generation")) == 1


@pytest.mark.sampled
def test_agents_asked_to_stop_while_the_api_server_is_away_stop_in_time(
    tmp_path: Path, plane: ControlPlane
) -> None:
    with Cluster(tmp_path, plane, run_id="stop", nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1")
        lab.stepping(1, world=2)
        plane.stop()
        try:
            for agent in lab.agents.values():
                agent.terminate()
            asked_at = time.monotonic()
            assert [lab.end(node) for node in ("node-0", "node-1")] == [200, 200]
            assert time.monotonic() - asked_at < 90
        finally:
            plane.start()

"""Ranks and agents that are lost: the group forms again, the loss is counted once, nothing is left
behind.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.patience import soon
from tests.trainer.agent.lab import Lab, children, command_of, descendants, is_alive, kill
from tests.trainer.rendezvous.api_server import ApiServer
from tests.trainer.rendezvous.proxy import Proxy

pytestmark = pytest.mark.processes


def test_a_lost_rank_and_a_lost_agent_are_replaced_and_each_is_counted_once(tmp_path: Path) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1")
        first = lab.stepping(1, world=2)

        kill(first[1]["pid"], signal.SIGKILL)
        second = lab.stepping(2, world=2)
        assert {rank["kdist_node"] for rank in second.values()} == {"node-0", "node-1"}
        (failure,) = lab.ledger("failure")
        assert (failure["cause"], failure["rank"], failure["generation"]) == ("signal", 1, 1)
        assert failure["node"] == first[1]["kdist_node"]
        assert failure["message"] == "rank 1 was killed by SIGKILL"

        victim = lab.agents["node-0"]
        family = descendants(victim.pid)
        assert len(family) >= 2, "a forkserver and a rank"
        victim.kill()
        victim.wait()
        assert soon(lambda: not any(map(is_alive, family))), "two seconds later nothing is left"

        lab.start("node-0")
        lab.stepping(3, world=2)
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]
        expected = ["start", "failure", "failure"]
        assert [one["reason"] for one in lab.ledger("generation")] == expected
        assert [one["cause"] for one in lab.ledger("failure")] == ["signal", "node_lost"]
        assert lab.ledger("failure")[1]["node"] == "node-0"
        assert [one["restarts"] for one in lab.events("node-1", "restarting")] == [1, 2]


@pytest.mark.sampled
def test_nodes_join_by_plan_and_leave_by_accident(tmp_path: Path) -> None:
    with Lab(tmp_path, nodes={"min": 1, "max": 2}) as lab:
        lab.start("node-0")
        lab.stepping(1, world=1)
        lab.start("node-1")
        (tmp_path / "elsewhere").mkdir()
        lab.start("stranger", run_id="run-2", LAB=str(tmp_path / "elsewhere"))
        joined = lab.stepping(2, world=2)
        at_work = {rank["kdist_node"] for rank in joined.values()}
        assert at_work == {"node-0", "node-1"}, "a foreign run id stays out"

        kill(lab.agents["node-0"].pid, signal.SIGKILL)
        alone = lab.stepping(3, world=1)
        assert alone[0]["kdist_node"] == "node-1"
        lab.start("node-0")
        lab.stepping(4, world=2)
        for agent in (lab.agents["node-0"], lab.agents["node-1"]):
            agent.terminate()
        assert [lab.end("node-0"), lab.end("node-1")] == [200, 200]
        for node in ("node-0", "node-1"):
            assert lab.record(node)["message"] == "stopped on request"
        expected = ["start", "join", "failure", "join"]
        assert [one["reason"] for one in lab.ledger("generation")] == expected
        restarts = [one["restarts"] for one in lab.events("node-1", "restarting")]
        assert restarts == [1], "joining costs no restart"


LONG: dict[str, Any] = {
    "terminationGracePeriodSeconds": 600,
    "joinWindowSeconds": 600,
    "hangTimeoutSeconds": 600,
}
"""Longer than any test: nobody waits for these where a failure stands in the exchange."""


def starting(lab: Lab, generation: int, rank: int) -> dict[str, Any]:
    """Wait until a rank of a generation has started and its peer waits for it; returns what it
    wrote.
    """
    lab.wait(lambda: len(lab.ranks(generation)) == 2, f"the ranks of generation {generation}")
    return lab.ranks(generation)[rank]


def stands(lab: Lab, generation: int, rank: int) -> bool:
    """Whether a rank is in one step for longer than any of the lab's steps takes."""
    steps: set[int] = set()
    deadline = time.monotonic() + 1
    while len(steps) < 2 and time.monotonic() < deadline:
        steps.add(lab.ranks(generation)[rank]["step"])
        time.sleep(0.02)
    return len(steps) == 1


def test_a_rank_that_is_killed_while_its_peer_computes_or_connects_to_it_is_noticed_by_all_at_once(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}, **LONG) as lab:
        lab.start("node-0", "node-1")
        first = lab.stepping(1, world=2)
        lab.tell("slow-0")
        lab.wait(lambda: stands(lab, 1, 0), "a step that lasts")
        lab.tell("hold-0")
        kill(first[1]["pid"], signal.SIGKILL)
        kill(starting(lab, 2, 0)["pid"], signal.SIGKILL)
        lab.untell("slow-0")
        lab.untell("hold-0")
        lab.stepping(3, world=2)
        expected = ["start", "failure", "failure"]
        assert [one["reason"] for one in lab.ledger("generation")] == expected
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]
        assert [one["cause"] for one in lab.ledger("failure")] == ["signal", "signal"]


@pytest.mark.sampled
def test_an_agent_that_is_killed_while_its_group_starts_costs_a_restart_each_time(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}, **LONG) as lab:
        lab.tell("hold-0")
        lab.start("node-0", "node-1")
        for generation in (1, 2):
            lost = starting(lab, generation, 0)["kdist_node"]
            lab.agents[lost].kill()
            lab.agents[lost].wait()
            lab.start(lost)
        starting(lab, 3, 0)
        lab.untell("hold-0")
        lab.stepping(3, world=2)
        expected = ["start", "failure", "failure"]
        assert [one["reason"] for one in lab.ledger("generation")] == expected
        assert [one["cause"] for one in lab.ledger("failure")] == ["node_lost", "node_lost"]


def test_nobody_need_come_back_for_an_agent_to_be_missed_while_its_group_starts(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, nodes={"min": 1, "max": 2}, **LONG) as lab:
        lab.tell("hold-0")
        lab.start("node-0", "node-1")
        lab.agents[starting(lab, 1, 0)["kdist_node"]].kill()
        lab.wait(lambda: lab.ranks(2), "another group")
        lab.untell("hold-0")
        lab.stepping(2, world=1)
        assert [one["reason"] for one in lab.ledger("generation")] == ["start", "failure"]


def test_an_agent_asked_to_stop_does_not_wait_for_a_rank_that_connects_to_its_peer_and_cannot_hear(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, procsPerNode=2, **LONG) as lab:
        lab.tell("hold-0")
        lab.start("node-0")
        starting(lab, 1, 0)
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 200
        assert lab.record("node-0")["message"] == "stopped on request, in the middle of work"


@pytest.mark.sampled
@pytest.mark.chaos
def test_an_agent_that_pauses_while_ranks_compute_costs_nothing(tmp_path: Path) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}, **LONG) as lab:
        lab.start("node-0", "node-1")
        ranks = lab.stepping(1, world=2)
        for rank in range(2):
            lab.tell(f"slow-{rank}")
        paused = lab.agents[ranks[1]["kdist_node"]]
        kill(paused.pid, signal.SIGSTOP)
        began = time.monotonic()
        lab.wait(
            lambda: time.monotonic() - began > 12,
            "a step that lasts longer than a silent node is given",
        )
        kill(paused.pid, signal.SIGCONT)
        for rank in range(2):
            lab.untell(f"slow-{rank}")
        step = lab.ranks(1)[0]["step"]
        lab.stepping(1, world=2, steps=step + 5)
        assert len(lab.ledger("generation")) == 1


@pytest.mark.sampled
@pytest.mark.chaos
def test_an_api_server_that_one_node_cannot_reach_costs_nothing(tmp_path: Path) -> None:
    api = ApiServer(tmp_path / "account", tls=True)
    with (
        Proxy(api.port) as proxy,
        Lab(tmp_path, rendezvous="kubernetes:ml/store", nodes={"min": 1, "max": 2}, **LONG) as lab,
    ):
        lab.start("node-0", **api.environment())
        lab.start("node-1", **api.environment(proxy.port))
        lab.stepping(1, world=2)
        proxy.cut()
        lab.wait(lambda: lab.events("node-1", "rendezvous-unreachable"), "that one node notices")
        began, step = time.monotonic(), lab.ranks(1)[0]["step"]
        lab.wait(
            lambda: time.monotonic() - began > 12, "many signs of life that the other node misses"
        )
        assert not lab.events("node-0", "rendezvous-unreachable")
        proxy.restore()
        lab.stepping(1, world=2, steps=step + 100)
        assert len(lab.ledger("generation")) == 1
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]
    api.stop()


def test_a_crash_loop_ends_when_the_budget_is_spent(tmp_path: Path) -> None:
    with Lab(tmp_path, entrypoint="crash", run_id="ml/lab", maxRestarts=2) as lab:
        lab.start("node-0")
        assert lab.end("node-0") == 75
        record = lab.record("node-0")
        assert (record["code"], record["cause"]) == (75, "budget")
        assert "rank 0 was killed by SIGKILL" in record["message"]
        assert len(lab.ledger("generation")) == 3, "the first try and two restarts"
        assert [one["cause"] for one in lab.ledger("failed")] == ["budget"]

        lab.start("node-0")
        assert lab.end("node-0") == 75, "agents that come later learn the result"

        lab.entrypoint = lab.entrypoint.replace("crash", "train")
        lab.arguments = ["--rendezvous-id=mended"]
        lab.tell("finish")
        lab.start("node-0")
        assert lab.end("node-0") == 0, "one of a mended job is not met with it"
        assert [one["generation"] for one in lab.ledger("generation")] == [1, 2, 3, 4]


@pytest.mark.sampled
def test_a_crash_loop_on_a_refusing_disk_ends_as_well(tmp_path: Path) -> None:
    with Lab(tmp_path, entrypoint="crash", maxRestarts=3) as lab:
        lab.checkpoints.mkdir()
        (lab.checkpoints / "ledger").write_text("a file where the folder should be")
        lab.start("node-0")
        assert lab.end("node-0") == 75
        assert [one["restarts"] for one in lab.events("node-0", "restarting")] == [1, 2, 3]
        (event,) = lab.events("node-0", "storage-unavailable")[:1]
        assert event["message"].endswith("retrying in 1 s")


@pytest.mark.sampled
def test_a_stopped_rank_is_found_and_replaced_and_a_second_request_to_stop_does_not_wait_for_it(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path, procsPerNode=2, hangTimeoutSeconds=3) as lab:
        lab.start("node-0")
        first = lab.stepping(1, world=2)
        kill(first[1]["pid"], signal.SIGSTOP)
        lab.stepping(2, world=2)
        assert not is_alive(first[1]["pid"])
        (hang,) = lab.events("node-0", "hang")
        assert hang["rank"] == 1, (
            "the one that is stopped is to blame, not the one that waits for it"
        )
        assert lab.ledger("failure")[0]["cause"] == "hang"

        family = children(lab.agents["node-0"].pid)
        (forkserver,) = (pid for pid in family if "resource_tracker" not in command_of(pid))
        kill(forkserver, signal.SIGKILL)
        third = lab.stepping(3, world=2)

        kill(third[1]["pid"], signal.SIGSTOP)
        lab.agents["node-0"].terminate()
        lab.wait(lambda: lab.events("node-0", "stopping"), "the first request")
        lab.agents["node-0"].terminate()
        assert lab.end("node-0") == 200
        assert lab.record("node-0")["message"] == "stopped on request, in the middle of work"


def test_what_a_rank_started_ends_with_it_and_its_peer_goes_on_at_once(tmp_path: Path) -> None:
    with Lab(tmp_path, nodes={"min": 2, "max": 2}) as lab:
        lab.start("node-0", "node-1", LAB_CHILDREN="yes")
        first = lab.stepping(1, world=2)
        offspring = read_children(lab, 1)
        kill(first[1]["pid"], signal.SIGKILL)
        assert soon(lambda: not any(map(is_alive, offspring))), (
            "a child of its own session and a daemon included"
        )
        second = lab.stepping(2, world=2)
        everybody = [second[0]["pid"], second[1]["pid"]]
        everybody += [*read_children(lab, 0), *read_children(lab, 1)]
        for node in ("node-0", "node-1"):
            assert len(list((tmp_path / node / "tmp").glob("pymp-*/listener-*"))) == 2, (
                "the forkserver's and the rank's"
            )
            assert len(list((tmp_path / node / "torchelastic").glob("*/attempt_*"))) == 1
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]
        assert not any(map(is_alive, everybody)), "nor does anything outlive ranks that end well"


def test_a_lost_agent_takes_its_ranks_and_their_children_along_though_they_are_stopped(
    tmp_path: Path,
) -> None:
    with Lab(tmp_path) as lab:
        lab.start("node-0", LAB_CHILDREN="yes")
        (rank,) = lab.stepping(1, world=1).values()
        child, session, daemon = read_children(lab, 0)
        family = [rank["pid"], child, session]
        for pid in family:
            kill(pid, signal.SIGSTOP)
        lab.agents["node-0"].kill()
        assert soon(lambda: not any(map(is_alive, family)))
        # who has no agent above is ended by `kdist run`, or with the pod
        kill(daemon, signal.SIGKILL)


def read_children(lab: Lab, rank: int) -> list[int]:
    """The processes that a rank has forked: a child, a child with a session of its own, a
    daemon.
    """
    paths = [lab.folder / f"child-{rank}-{kind}" for kind in ("child", "session", "daemon")]
    lab.wait(
        lambda: all(path.exists() and path.read_text() for path in paths),
        f"the children of rank {rank}",
    )
    return [int(path.read_text()) for path in paths]

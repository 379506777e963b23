"""Agents that meet at the agent of node 0, as where no Role may be granted: it may come last, and
its loss ends all.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from pathlib import Path

import pytest

from kdist_trainer.rendezvous.handler import pick_port
from kdist_trainer.rendezvous.stores import is_own_host, open_tcp_store
from tests.trainer.agent.lab import Lab, descendants, kill


def loopback() -> str:
    """The loopback's IPv6 address where this machine has one, else that of IPv4."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1"
    except OSError:
        return "127.0.0.1"


def test_the_host_is_known_by_its_name_or_its_address() -> None:
    assert is_own_host(f"{socket.gethostname()}.digits", node="digits-1", address="10.0.0.7")
    assert is_own_host("digits-0.digits.ml.svc", node="digits-0", address="10.0.0.7")
    assert is_own_host("localhost", node="digits-1", address="127.0.0.1")
    assert not is_own_host("localhost", node="digits-1", address="10.0.0.7")
    assert not is_own_host("digits-0.invalid", node="digits-1", address="10.0.0.7")


@pytest.mark.sampled
def test_the_first_to_come_keeps_the_store_and_a_name_that_nobody_knows_is_given_up_in_time() -> (
    None
):
    port = pick_port()
    (first, keeps), (second, keeps_too) = (
        open_tcp_store(
            "127.0.0.1",
            port,
            node=node,
            address="127.0.0.1",
            timeout_seconds=5,
            retry_seconds=20,
        )
        for node in ("node-0", "node-1")
    )
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert (keeps, keeps_too) == (True, False)
    with pytest.raises(OSError, match="known"):
        open_tcp_store(
            "digits-0.invalid",
            port,
            node="digits-1",
            address=None,
            timeout_seconds=5,
            retry_seconds=0.1,
        )


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform != "linux", reason="/proc counts descriptors")
def test_a_flood_of_the_store_uses_up_no_descriptor_of_the_agent_that_hosts_it() -> None:
    port = pick_port()
    store, is_host = open_tcp_store(
        "127.0.0.1", port, node="node-0", address="127.0.0.1", timeout_seconds=60, retry_seconds=60
    )
    store.set("key", "value")
    before = count_descriptors()
    with contextlib.ExitStack() as flood:
        for number in range(400):
            one = flood.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            one.sendall(b"\xff" * (number % 3))
        assert count_descriptors() == before + 400, "the ends of this test"
        assert store.get("key") == b"value"
    assert is_host


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.sampled
@pytest.mark.processes
def test_agents_meet_train_and_end_together_over_ipv6(tmp_path: Path) -> None:
    host = loopback()
    place = f"c10d:{f'[{host}]' if ':' in host else host}:{pick_port()}"
    with Lab(tmp_path, rendezvous=place, nodes={"min": 2, "max": 2}) as lab:
        lab.arguments = ["--address", host]
        lab.start("node-0", "node-1")
        ranks = lab.stepping(1, world=2)
        assert {rank["master_addr"] for rank in ranks.values()} == {host}
        kill(ranks[1]["pid"], signal.SIGKILL)
        lab.stepping(2, world=2)
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]


@pytest.mark.sampled
@pytest.mark.processes
def test_without_the_agent_that_keeps_the_store_the_others_end_to_be_started_again(
    tmp_path: Path,
) -> None:
    with Lab(
        tmp_path, rendezvous=f"c10d:127.0.0.1:{pick_port()}", nodes={"min": 1, "max": 2}
    ) as lab:
        lab.start("node-0")
        lab.stepping(1, world=1)
        lab.start("node-1")
        lab.stepping(2, world=2)
        agent = lab.agents["node-0"].pid
        for pid in [*descendants(agent), agent]:
            kill(pid, signal.SIGKILL)
        assert lab.end("node-1") == 201
        assert lab.record("node-1")["cause"] == "rendezvous"
        lab.start("node-0", "node-1")
        lab.stepping(lab.ledger("generation")[-1]["generation"] + 1, world=2)
        lab.tell("finish")
        assert [lab.end("node-0"), lab.end("node-1")] == [0, 0]


@pytest.mark.sampled
@pytest.mark.processes
def test_a_lost_store_ends_an_agent_whose_ranks_still_connect_to_their_peers(
    tmp_path: Path,
) -> None:
    with Lab(
        tmp_path, rendezvous=f"c10d:127.0.0.1:{pick_port()}", nodes={"min": 2, "max": 2}
    ) as lab:
        (tmp_path / "hold-0").touch()
        lab.start("node-0")
        lab.wait(lambda: "rendezvous-started" in lab.logs(), "the store in node-0")
        lab.start("node-1")
        lab.wait(
            lambda: all((tmp_path / f"rank-{rank}.json").exists() for rank in (0, 1)),
            "both ranks, of which one waits for the other in torch's connect",
        )
        host = lab.agents["node-0"].pid
        for pid in [*descendants(host), host]:
            kill(pid, signal.SIGKILL)
        assert lab.end("node-1") == 201
        assert lab.record("node-1")["cause"] == "rendezvous"


@pytest.mark.sampled
@pytest.mark.processes
def test_when_the_agent_that_keeps_the_store_is_asked_to_end_the_others_end_to_be_started_again(
    tmp_path: Path,
) -> None:
    with Lab(
        tmp_path, rendezvous=f"c10d:127.0.0.1:{pick_port()}", nodes={"min": 2, "max": 2}
    ) as lab:
        lab.start("node-0")
        lab.wait(lambda: "rendezvous-started" in lab.logs(), "the store in node-0")
        lab.start("node-1")
        lab.stepping(1, world=2)
        kill(lab.agents["node-0"].pid, signal.SIGTERM)
        assert lab.end("node-0") == 200
        assert lab.end("node-1") == 201
        assert lab.record("node-1")["cause"] == "rendezvous"

"""A store of torch's that kdist hosts can be reached by the ranks of its group and by nobody else,
and no longer than the group lasts.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kdist_trainer.distributed.hosted_store import HostedStore, listen, open_script_store
from kdist_trainer.distributed.world import World, abandon
from kdist_trainer.network.socket_filter import attach_filter, peers_of
from kdist_trainer.rendezvous.handler import pick_port
from kdist_trainer.torch_internals import TCPStore
from tests.faults.sockets import SHORT, Listener, connect, listeners, own_addresses
from tests.trainer.training.group import run_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")
TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def hosted() -> Iterator[HostedStore]:
    """A store for one rank, at the loopback."""
    store = HostedStore("127.0.0.1", pick_port(), size=1, timeout=TIMEOUT)
    yield store
    store.close()


def test_a_store_listens_at_the_address_that_it_is_given_alone(hosted: HostedStore) -> None:
    port = hosted.store.port
    assert connect(port) == "connected"
    assert {connect(port, host=each) for each in own_addresses()} == {"ConnectionRefusedError"}


def test_a_port_serves_again_though_the_store_that_had_it_is_still_held() -> None:
    port = pick_port()
    former = HostedStore("127.0.0.1", port, size=1, timeout=TIMEOUT)
    held = former.store
    former.close()
    found: list[HostedStore] = []

    def host() -> None:
        found.append(HostedStore("127.0.0.1", port, size=1, timeout=TIMEOUT))

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for the former one"
    found[0].store.set("key", "value")
    assert found[0].store.get("key") == b"value"
    found[0].close()
    del held


def test_newcomers_are_dropped_and_members_keep_working(hosted: HostedStore) -> None:
    port = hosted.store.port
    member = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    hosted.refuse_newcomers(admit_members=False)
    assert connect(port) == "TimeoutError"
    member.set("key", "value")
    assert hosted.store.get("key") == b"value"


def test_newcomers_from_the_members_machines_are_admitted_where_members_connect_again(
    hosted: HostedStore,
) -> None:
    port = hosted.store.port
    hosted.refuse_newcomers(admit_members=True)
    assert peers_of(port, socket.AF_INET) == {"127.0.0.1"}
    assert [connect(port), connect(port, "127.0.0.3")] == ["connected", "TimeoutError"]


@pytest.mark.parametrize("admit", [True, False])
def test_the_same_holds_over_ipv6(admit: bool) -> None:
    try:
        hosted = HostedStore("::1", pick_port(), size=1, timeout=TIMEOUT)
    except dist.DistNetworkError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    hosted.refuse_newcomers(admit_members=admit)
    wanted = "connected" if admit else "TimeoutError"
    assert connect(hosted.store.port, "::1", host="::1") == wanted
    hosted.close()


def test_a_filter_tells_each_of_many_addresses_from_others(hosted: HostedStore) -> None:
    known = [f"127.0.{third}.{fourth}" for third in range(4) for fourth in range(1, 101)]
    descriptor = vars(hosted)["_descriptor"]
    assert attach_filter(descriptor, socket.AF_INET, known)
    port = hosted.store.port
    tries = [known[0], known[-1], "127.0.9.1"]
    assert [connect(port, source) for source in tries] == ["connected", "connected", "TimeoutError"]
    too_many = [f"127.1.{third}.{fourth}" for third in range(8) for fourth in range(1, 201)]
    assert not attach_filter(descriptor, socket.AF_INET, too_many)


def test_a_closed_store_listens_no_more_though_something_holds_it(hosted: HostedStore) -> None:
    port, store = hosted.store.port, hosted.store
    hosted.close()
    assert connect(port) == "ConnectionRefusedError"
    store.set("key", "value")
    assert store.get("key") == b"value"
    before = time.process_time()
    time.sleep(SHORT)
    assert time.process_time() - before < SHORT / 2, "a thread of torch's spins"


def test_stores_that_were_closed_leave_no_descriptor() -> None:
    def use() -> int:
        hosted = HostedStore("127.0.0.1", pick_port(), size=1, timeout=TIMEOUT)
        hosted.refuse_newcomers(admit_members=False)
        hosted.close()
        return len(list(Path("/proc/self/fd").iterdir()))

    first = use()
    assert max(use() for _ in range(20)) <= first + 1


def test_a_port_that_another_process_has_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(dist.DistNetworkError, match=f"127.0.0.1 port {port}: EADDRINUSE"):
            HostedStore("127.0.0.1", port, size=1, timeout=TIMEOUT)


def test_a_name_of_no_address_of_this_machine_is_bound_to_all_with_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with listen("192.0.2.1", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")  # noqa: S104
    assert '"event":"store-unbound"' in capfd.readouterr().err


def test_a_name_that_means_loopback_here_is_bound_to_all_since_others_may_know_it_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with listen("workstation", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")  # noqa: S104
    with listen("localhost", 0) as server:
        assert server.getsockname()[0] == "127.0.1.1"


def form_groups(ports: list[int]) -> tuple[list[str], set[Listener], list[float]]:
    """Of rank 0: what newcomers meet, what listens after ten groups that were left broken, and the
    sums of new groups, which were made after newcomers were refused.
    """
    sums, met = [], []
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        world = World.from_environment(timeout_seconds=60)
        other: Any = dist.new_group([0, 1])
        total = torch.ones(1)
        dist.all_reduce(total, group=other)
        sums.append(total.item())
        world.barrier()
        if world.rank == 0:
            met.append(connect(port))
        world.barrier()
        abandon(timedelta(seconds=60))
    ours = {each for each in listeners([os.getpid()]) if each.port in ports}
    return met, ours, sums


@pytest.mark.sampled
@pytest.mark.processes
def test_ranks_keep_their_store_to_themselves_and_leave_no_listener_with_broken_groups() -> None:
    (met, left, sums), (_, _, others) = run_group(form_groups, 2, [pick_port() for _ in range(10)])
    assert set(met) == {"TimeoutError"}
    assert left == set()
    assert sums == others == [2.0] * 10


def script_rank(rank: int, port: int, results: dict[int, object]) -> None:
    """What `init_process_group` does in each rank of a script."""
    results[rank] = open_script_store(
        host_name="127.0.0.1",
        port=port,
        world_size=2,
        is_master=rank == 0,
        timeout=TIMEOUT,
        multi_tenant=True,
        use_libuv=True,
    )


def test_a_scripts_store_admits_the_machines_of_its_ranks_and_may_be_opened_again() -> None:
    port, stores = pick_port(), dict[int, object]()
    ranks = [threading.Thread(target=script_rank, args=(rank, port, stores)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [connect(port), connect(port, "127.0.0.3")] == ["connected", "TimeoutError"]
    assert {connect(port, host=each) for each in own_addresses()} == {"ConnectionRefusedError"}
    again = dict[int, object]()
    for rank in (0, 1):
        script_rank(rank, port, again)
    first, second = stores[1], again[0]
    assert isinstance(first, TCPStore)
    assert isinstance(second, TCPStore)
    first.set("key", "value")
    assert second.get("key") == b"value"

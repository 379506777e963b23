"""The exchange of one round: what a host keeps for its peers, and what these notice of its loss."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore

from kdist_trainer.processes.signals import StopRequested
from kdist_trainer.rendezvous import exchange
from kdist_trainer.rendezvous.exchange import ExchangeHost, ExchangeServer, ExchangeStore
from tests.house.tree import ROOT
from tests.trainer.rendezvous.keys import KEY

_HOST = """
from kdist_trainer.rendezvous.exchange import ExchangeServer
from tests.trainer.rendezvous.keys import KEY
host = ExchangeServer("127.0.0.1", key=KEY, nodes=lambda: 128).offer(3, 0)
print(host.port, host.token, flush=True)
input()
"""


@pytest.fixture
def server() -> Iterator[ExchangeServer]:
    server = ExchangeServer("127.0.0.1", key=KEY, nodes=lambda: 128)
    yield server
    server.close()


def open_host(server: ExchangeServer, number: int = 0) -> ExchangeHost:
    host = server.offer(number, 0)
    assert host is not None
    return host


def connect(host: ExchangeHost, *, seconds: float = 20.0) -> ExchangeStore:
    return ExchangeStore(host, timeout_seconds=seconds)


@pytest.fixture
def remote() -> Iterator[tuple[subprocess.Popen[str], ExchangeHost]]:
    """A host in another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOST], cwd=ROOT, stdin=-1, stdout=-1, text=True
    )
    assert process.stdout is not None
    port, token = process.stdout.readline().split()
    yield process, ExchangeHost(3, "127.0.0.1", int(port), token, 0)
    process.kill()
    process.communicate()


def test_a_value_reaches_those_that_wait_for_it_and_those_that_come_later(
    server: ExchangeServer,
) -> None:
    host = open_host(server)
    found: list[list[bytes]] = []
    waiter = threading.Thread(target=lambda: found.append(connect(host).multi_get(["a", "b"])))
    waiter.start()
    writer = connect(host)
    PrefixStore("prefix", writer).set("a", "1")  # here torch hands bytes to the store
    writer.multi_set(["a", "b"], ["one", b"\x00\xff"])
    waiter.join(20)
    assert found == [[b"one", b"\x00\xff"]]
    late = connect(host)
    assert late.peek(["b", "c", "prefix/a"]) == [b"\x00\xff", None, b"1"]
    assert late.check(["a", "b"])
    assert not late.check(["a", "c"])


def test_a_key_that_nobody_sets_is_named_and_the_store_goes_on(server: ExchangeServer) -> None:
    store = connect(open_host(server), seconds=0.1)
    with pytest.raises(DistStoreError, match="wait timeout after 100ms, keys: missing"):
        store.get("missing")
    with pytest.raises(DistStoreError, match="wait timeout after 50ms"):
        store.wait(["missing"], timedelta(milliseconds=50))
    store.set("missing", "found")
    assert store.get("missing") == b"found"


def test_a_round_does_not_see_the_keys_of_another_nor_does_a_stranger(
    server: ExchangeServer,
) -> None:
    first, second = open_host(server, 1), open_host(server, 2)
    assert server.is_host(first)
    connect(first).set("key", "first")
    assert connect(second).peek(["key"]) == [None]
    stranger = ExchangeHost(1, first.address, first.port, "0" * 32, 0)
    assert not server.is_host(stranger)
    with pytest.raises(DistNetworkError, match="the exchange of round 1"):
        connect(stranger).peek(["key"])


def test_a_request_without_an_end_is_cut_off_and_the_others_go_on(server: ExchangeServer) -> None:
    host = open_host(server)
    with socket.create_connection((host.address, host.port)) as stranger, suppress(ConnectionError):
        for _ in range(5):
            stranger.sendall(b"x" * (1 << 20))
        stranger.settimeout(20)
        assert stranger.recv(1) == b"", "the host has closed the connection"
    store = connect(host)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_all_agents_of_a_large_job_may_connect_at_once(server: ExchangeServer) -> None:
    host, size = open_host(server), 128
    gate, sums = threading.Barrier(size), []

    def exchange_with_all(rank: int) -> None:
        gate.wait()
        store = connect(host, seconds=60)
        store.set(str(rank), str(rank))
        sums.append(sum(map(int, store.multi_get([str(other) for other in range(size)]))))

    threads = [threading.Thread(target=exchange_with_all, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sums == [sum(range(size))] * size


@pytest.mark.processes
def test_who_waits_hears_at_once_that_the_host_was_killed(
    remote: tuple[subprocess.Popen[str], ExchangeHost],
) -> None:
    process, host = remote
    store, errors = connect(host, seconds=250), []

    def wait() -> None:
        try:
            store.get("never")
        except DistNetworkError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    process.kill()
    waiter.join(200)
    assert len(errors) == 1
    assert "which hosts the exchange of round 3, does not respond" in errors[0]
    with pytest.raises(DistNetworkError):
        connect(host).set("key", "where another process may listen by now")


@pytest.mark.processes
def test_a_host_that_falls_silent_is_given_up(
    remote: tuple[subprocess.Popen[str], ExchangeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, host = remote
    store = connect(host, seconds=0.1)
    monkeypatch.setattr(exchange, "_RESPONSE_SECONDS", 0.5)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(DistNetworkError, match="does not respond"):
        store.get("key")
    with pytest.raises(DistNetworkError):
        store.set("key", "a store whose host was given up stays so")


def test_a_request_to_stop_ends_a_wait_and_its_answer_is_nobodys(server: ExchangeServer) -> None:
    host = open_host(server)
    store = connect(host, seconds=250)

    def stop(*_: object) -> None:
        raise StopRequested

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.3, os.kill, args=(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(StopRequested):
            store.get("late")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    connect(host).set("late", "too late")
    with pytest.raises(DistNetworkError):
        store.get("another")

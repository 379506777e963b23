"""The members of a round hear which of them have died, and take nothing else for a death."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kdist_trainer.rendezvous.exchange import ExchangeHost, ExchangeServer
from kdist_trainer.rendezvous.membership import MemberConnection
from kdist_trainer.rendezvous.state import RendezvousTimings
from tests.house.tree import ROOT
from tests.patience import soon
from tests.trainer.rendezvous.keys import KEY
from tests.trainer.rendezvous.test_handler import meet

_MEMBER = """
import sys
from kdist_trainer.rendezvous.exchange import ExchangeHost
from kdist_trainer.rendezvous.membership import MemberConnection
port, token, rank = sys.argv[1:]
member = MemberConnection(ExchangeHost(3, "127.0.0.1", int(port), token, 0), int(rank))
print("connects", flush=True)
if sys.stdin.readline() == "leave":
    member.leave()
"""
_HOST = """
from kdist_trainer.rendezvous.exchange import ExchangeServer
from tests.trainer.rendezvous.keys import KEY
host = ExchangeServer("127.0.0.1", key=KEY, nodes=lambda: 128).offer(3, 0)
print("listens", flush=True)
print(host.port, host.token, flush=True)
input()
"""
_AGENT = """
import sys
from pathlib import Path
from tests.patience import soon
from tests.trainer.rendezvous.test_handler import meet
nodes = int(sys.argv[3])
node = meet(Path(sys.argv[1]), index=int(sys.argv[2]), high=nodes)
print("is ready", flush=True)
sys.stdin.readline()
node.next_rendezvous()
assert soon(lambda: [each for each in node._membership.connections if each._socket][nodes - 2:], 60)
print("is connected", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def server() -> Iterator[ExchangeServer]:
    server = ExchangeServer("127.0.0.1", key=KEY, nodes=lambda: 128)
    yield server
    server.close()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a program in a process of its own, and waits for its first line; `wait=False` leaves
    that to the caller.
    """
    started = []

    def run(program: str, *arguments: object, wait: bool = True) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True)
        started.append(process)
        assert not wait or read_line(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def offer(server: ExchangeServer) -> ExchangeHost:
    host = server.offer(3, 0)
    assert host is not None
    return host


def connected(server: ExchangeServer, host: ExchangeHost) -> set[int]:
    return set(server._exchanges[host.token].members._members)


@pytest.mark.sampled
@pytest.mark.processes
def test_all_hear_of_a_member_that_was_killed_and_not_of_one_that_is_stopped(
    server: ExchangeServer, start: Callable[..., subprocess.Popen[str]]
) -> None:
    host = offer(server)
    members = [MemberConnection(host, rank) for rank in (0, 1)]
    victim, stopped = (start(_MEMBER, host.port, host.token, rank) for rank in (2, 3))
    assert soon(lambda: connected(server, host) == {0, 1, 2, 3})
    stopped.send_signal(signal.SIGSTOP)
    victim.kill()
    assert soon(lambda: all(member.disconnected() == {2} for member in members))
    late = MemberConnection(host, 4)
    assert soon(lambda: late.disconnected() == {2}), "who comes later hears it too"
    assert not late.disconnected(seconds=600)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("stopped", ["member", "host"])
def test_all_hear_of_a_process_that_falls_silent_and_when_it_is_heard_again(
    stopped: str, server: ExchangeServer, start: Callable[..., subprocess.Popen[str]]
) -> None:
    if stopped == "host":
        process = start(_HOST)
        port, token = read_line(process).split()
        host, silent = ExchangeHost(3, "127.0.0.1", int(port), token, 0), 0
    else:
        host, silent = offer(server), 2
        process = start(_MEMBER, host.port, host.token, silent)
    members = [MemberConnection(host, rank) for rank in (1, 3)]
    assert soon(lambda: all(member._socket for member in members))
    process.send_signal(signal.SIGSTOP)
    assert soon(lambda: all(member.silent(1.0) == {silent} for member in members), 20)
    process.send_signal(signal.SIGCONT)
    assert soon(lambda: not any(member.silent(1.0) for member in members), 20)
    process.send_signal(signal.SIGSTOP)
    assert soon(lambda: all(member.silent(1.0) == {silent} for member in members), 20)
    assert all(member._longest_silence > 1.0 for member in members), "a busy node gets more time"
    assert not any(member.disconnected() for member in members)


def test_a_pause_of_this_process_is_no_silence_of_the_others(
    server: ExchangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = offer(server)
    member = MemberConnection(host, 0)
    assert soon(lambda: member._socket)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 600)
    assert not member.silent(1.0)
    server._exchanges[host.token].members.send()
    assert soon(lambda: not member.silent(1.0))


def test_a_member_that_does_not_connect_in_time_counts_as_disconnected_until_it_does(
    server: ExchangeServer,
) -> None:
    host = offer(server)
    watcher = MemberConnection(host, 0)
    server.expect(host, {0, 1}, 0.3)
    assert soon(lambda: watcher.disconnected() == {1})
    late = MemberConnection(host, 1)
    assert soon(lambda: not watcher.disconnected() and not late.disconnected())


@pytest.mark.sampled
@pytest.mark.processes
def test_a_member_that_leaves_on_purpose_is_not_reported(
    server: ExchangeServer, start: Callable[..., subprocess.Popen[str]]
) -> None:
    host = offer(server)
    watcher = MemberConnection(host, 0)
    leaver, victim = (start(_MEMBER, host.port, host.token, rank) for rank in (1, 2))
    assert soon(lambda: connected(server, host) == {0, 1, 2})
    leaver.communicate("leave")
    assert soon(lambda: connected(server, host) == {0, 2})
    victim.kill()
    assert soon(watcher.disconnected)
    assert watcher.disconnected() == {2}


def test_a_connection_that_something_between_the_nodes_has_closed_is_opened_again(
    server: ExchangeServer,
) -> None:
    host = offer(server)
    watcher, member = MemberConnection(host, 0), MemberConnection(host, 1)
    assert soon(lambda: connected(server, host) == {0, 1} and member._socket is not None)
    first = member._socket
    assert first is not None
    first.shutdown(socket.SHUT_RDWR)
    assert soon(lambda: member._socket is not first)
    assert soon(lambda: not member.disconnected() and not watcher.disconnected())
    assert connected(server, host) == {0, 1}


def test_a_host_that_cannot_be_reached_from_the_start_is_not_reported() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        member = MemberConnection(ExchangeHost(3, "127.0.0.1", port, "token", 0), 1)
        unused.listen()
        unused.accept()[0].close()  # it has tried
    assert not soon(member.disconnected, seconds=0.5)
    member.leave()


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(("nodes", "index"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_the_survivor_of_killed_agents_continues_without_waiting_for_missed_keep_alives(
    nodes: int,
    index: int,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the host is killed together with the second host or another member."""
    timings = replace(RendezvousTimings.for_nodes(nodes), keep_alive=600.0)
    monkeypatch.setattr(RendezvousTimings, "for_nodes", lambda *_, **__: timings)
    survivor = meet(tmp_path, index=index, high=nodes)
    others = {*range(nodes)} - {index}
    victims = [start(_AGENT, tmp_path, other, nodes, wait=False) for other in others]
    # who joins waits five seconds for the others, which may take longer to import torch
    assert [read_line(victim) for victim in victims] == ["is ready\n"] * len(victims)
    for victim in victims:
        assert victim.stdin is not None
        victim.stdin.write("join\n")
        victim.stdin.flush()
    assert survivor.next_rendezvous().world_size == nodes
    assert [read_line(victim) for victim in victims] == ["is connected\n"] * len(victims)
    members = survivor._membership
    assert members is not None
    assert soon(lambda: [each for each in members.connections if each._socket][nodes - 2 :], 60)
    assert survivor.status().left == 0
    for victim in victims:
        victim.kill()
    # ten times sooner than a keep-alive is missed, and time for a busy machine to end processes
    assert soon(lambda: survivor.status().left == nodes - 1, 60)
    assert survivor.next_rendezvous().world_size == 1
    survivor.leave()

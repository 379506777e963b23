"""The server that strangers can reach: what each may use is bounded, and nothing ends it."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kdist_trainer.network.server import BoundedServer, Bounds, Connection, Session
from kdist_trainer.processes import descriptors
from tests.patience import soon

MEMBERS = 8
LINE = 1 << 16
HOLD = b"hold"
"""A request that is never answered."""


class Echo(Session):
    """Admits who says `friend`, and answers each line of a friend with the same."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def receive(self, data: bytearray) -> None:
        while (end := data.find(b"\n")) >= 0:
            line = bytes(data[:end])
            del data[: end + 1]
            if self.connection.is_admitted:
                self.connection.send(line, b"\n")
            elif line == b"friend":
                self.connection.admit()
            elif line == b"bug":
                raise RuntimeError("a bug")
            else:
                raise ValueError(line)


@contextmanager
def serving(
    make: Callable[[Connection], Session] = Echo, *, strangers: int = 128, seconds: float = 5.0
) -> Iterator[BoundedServer]:
    bounds = Bounds(
        opening_bytes=16,
        message_bytes=LINE,
        strangers=strangers,
        admitted=lambda: MEMBERS,
        seconds=seconds,
    )
    made = BoundedServer("echo", ["127.0.0.1"], 0, bounds=bounds, open_session=make)
    try:
        yield made
    finally:
        made.close()


class Client:
    """A client of the server."""

    def __init__(self, made: BoundedServer, *, friend: bool = False) -> None:
        self.socket = socket.create_connection(("127.0.0.1", made.port), timeout=30)
        if friend:
            self.socket.sendall(b"friend\n")
            assert self.ask(b"hello") == b"hello"

    def ask(self, line: bytes) -> bytes:
        self.socket.sendall(line + b"\n")
        return self.read(len(line) + 1)[:-1]

    def read(self, size: int) -> bytes:
        found = b""
        while len(found) < size and (part := self.socket.recv(size - len(found))):
            found += part
        return found

    def is_closed(self) -> bool:
        """Whether the server has closed the connection; waits for that."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True


@pytest.fixture
def made() -> Iterator[BoundedServer]:
    with serving() as made:
        yield made


def test_a_friend_is_answered_and_a_stranger_is_not(made: BoundedServer) -> None:
    friend, stranger = Client(made, friend=True), Client(made)
    stranger.socket.sendall(b"enemy\n")
    assert stranger.is_closed()
    assert friend.ask(b"x" * (LINE - 1)) == b"x" * (LINE - 1)
    assert made.refused["token"] == 1


def test_a_stranger_has_few_bytes_and_a_friend_a_message(made: BoundedServer) -> None:
    stranger, friend = Client(made), Client(made, friend=True)
    stranger.socket.sendall(b"x" * 17)
    assert stranger.is_closed()
    with contextlib.suppress(ConnectionError):
        friend.socket.sendall(b"x" * (3 * LINE))
    assert friend.is_closed()
    assert made.refused["oversized"] == 2


def test_a_stranger_has_few_seconds_and_a_friend_may_be_idle() -> None:
    with serving(seconds=0.3) as made:
        friend, stranger = Client(made, friend=True), Client(made)
        stranger.socket.sendall(b"fri")
        assert stranger.is_closed()
        assert made.refused["timeout"] == 1
        assert friend.ask(b"still here") == b"still here"


def test_the_idlest_strangers_make_room_for_others_and_friends_keep_their_places() -> None:
    with serving(strangers=10, seconds=600) as made:
        friends = [Client(made, friend=True) for _ in range(MEMBERS)]
        strangers = [Client(made) for _ in range(30)]
        assert all(stranger.is_closed() for stranger in strangers[:20])
        assert soon(lambda: made.refused["limit"] == 20)
        assert all(friend.ask(b"x") == b"x" for friend in friends)
        strangers[-1].socket.sendall(b"friend\n")
        assert strangers[-1].ask(b"one more") == b"one more", "the idlest friend makes room"
        assert friends[0].is_closed()
        assert made.refused["limit"] == 21


def test_many_strangers_of_one_address_do_not_displace_one_of_another() -> None:
    with serving(strangers=4, seconds=600) as made:
        with socket.socket() as early:
            early.bind(("127.0.0.2", 0))
            early.connect(("127.0.0.1", made.port))
            flood = [Client(made) for _ in range(20)]
            assert soon(lambda: made.refused["limit"] == 17)
            early.sendall(b"friend\nhello\n")
            early.settimeout(30)
            assert early.recv(6) == b"hello\n"
        del flood


def test_a_client_that_does_not_read_is_closed_and_holds_up_nobody() -> None:
    with serving(seconds=0.5) as made:
        deaf, friend = Client(made, friend=True), Client(made, friend=True)
        deaf.socket.setblocking(False)

        def is_closed_while_it_asks() -> bool:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while True:
                    deaf.socket.send(b"x" * 1000 + b"\n")
            return made.refused["timeout"] == 1

        assert soon(is_closed_while_it_asks)
        assert friend.ask(b"x") == b"x"


def test_a_fault_ends_one_connection_and_is_logged(
    made: BoundedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    friend, unlucky = Client(made, friend=True), Client(made)
    unlucky.socket.sendall(b"bug\n")
    assert unlucky.is_closed()
    assert friend.ask(b"x") == b"x"
    assert '"event":"connection-failed"' in capfd.readouterr().err


def test_all_connections_share_one_thread(made: BoundedServer) -> None:
    before = threading.active_count()
    clients = [Client(made, friend=True) for _ in range(MEMBERS)]
    clients += [Client(made) for _ in range(100)]
    assert all(client.ask(b"x") == b"x" for client in clients[:MEMBERS])
    assert threading.active_count() == before


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """A low limit of open files; the tests and the server are one process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def use_up() -> list[int]:
    """Open files until there is no descriptor left."""
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    return opened


@pytest.mark.usefixtures("few_descriptors")
def test_without_descriptors_clients_are_refused_and_the_others_are_served(
    made: BoundedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    friend = Client(made, friend=True)
    with socket.socket() as late:
        opened = use_up()
        late.connect(("127.0.0.1", made.port))
        late.settimeout(30)
        assert late.recv(1) == b"", "closed with a descriptor from the reserve"
        assert friend.ask(b"x") == b"x"
        assert made.refused["resources"] == 1
        busy = time.process_time()
        time.sleep(0.3)  # a server that fails to accept without end would use all of it
        assert time.process_time() - busy < 0.2
        assert descriptors.spend(lambda: Path("/proc/self/stat").read_bytes())
        for descriptor in opened:
            os.close(descriptor)
    assert Client(made, friend=True).ask(b"y") == b"y"
    assert "no file descriptor or memory left" in capfd.readouterr().err


@pytest.mark.usefixtures("few_descriptors")
def test_a_listener_without_a_reserve_pauses_and_goes_on(
    made: BoundedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OSError(24, "no reserve")

    monkeypatch.setattr(descriptors, "spend", refuse)
    late = socket.socket()
    opened = use_up()
    late.connect(("127.0.0.1", made.port))
    assert soon(lambda: made.refused["resources"] == 1)
    for descriptor in opened:
        os.close(descriptor)
    late.settimeout(30)
    late.sendall(b"friend\nhello\n")
    assert late.recv(6) == b"hello\n", "it is accepted after the pause"
    late.close()


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = len([*Path("/proc/self/fd").iterdir()])
        resource.setrlimit(resource.RLIMIT_NOFILE, (64 + opened, hard))
        assert descriptors.raise_limit() == min(hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""A rank ends the waits of its process groups by itself, and touches no other connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kdist_trainer.distributed import group_abort
from kdist_trainer.errors import PeersLostError


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    group_abort.reset()


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def is_open(end: socket.socket) -> bool:
    """Whether the peer of this end has not closed the connection."""
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True
    finally:
        end.setblocking(True)


def test_only_the_connections_of_the_group_are_shut_down() -> None:
    own, peer_of_own = connection()
    with group_abort.recording():
        group, peer_of_group = connection()
    later, peer_of_later = connection()
    group_abort.abort()
    assert not is_open(peer_of_group)
    assert is_open(peer_of_own)
    assert is_open(peer_of_later)
    for end in (own, peer_of_own, group, peer_of_group, later, peer_of_later):
        end.close()


def test_a_connection_that_is_being_opened_is_shut_down_too() -> None:
    with group_abort.recording():
        group, peer = connection()
        group_abort.abort()
        assert not is_open(peer)
    group.close()
    peer.close()


def test_the_descriptor_of_a_closed_connection_may_be_used_again() -> None:
    with group_abort.recording():
        group, peer = connection()
    descriptor = group.fileno()
    group.close()
    peer.close()
    users, peer_of_users = connection()
    assert descriptor in (users.fileno(), peer_of_users.fileno()), "the kernel uses it again"
    group_abort.abort()
    assert is_open(peer_of_users)
    assert is_open(users)
    users.close()
    peer_of_users.close()


def test_a_descriptor_that_has_become_a_folder_meanwhile_is_left_alone_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        # as another thread sees it that has read the names before they changed
        monkeypatch.setattr(group_abort, "_open_sockets", lambda: {folder: "socket:[1]"})
        monkeypatch.setattr(group_abort, "_recorded", {"socket:[1]"})
        before = set(Path("/dev/fd").iterdir())
        group_abort.abort()
        assert set(Path("/dev/fd").iterdir()) == before
    finally:
        os.close(folder)


def test_a_future_ends_with_the_groups_also_if_it_comes_late() -> None:
    early: torch.futures.Future[int] = torch.futures.Future()
    group_abort.register(early)
    group_abort.abort()
    late: torch.futures.Future[int] = torch.futures.Future()
    group_abort.register(late)
    for future in (early, late):
        with pytest.raises(PeersLostError):
            future.wait()
    with pytest.raises(PeersLostError):
        group_abort.raise_if_aborted()
    group_abort.reset()
    group_abort.raise_if_aborted()


def test_a_future_that_is_complete_keeps_its_result() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    group_abort.register(future)
    future.set_result(3)
    group_abort.abort()
    assert future.wait() == 3

"""The connection to a command in a pod is closed whatever ends the command here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from websocket import ABNF, WebSocket, create_connection

from kdist.cluster import Cluster, connect
from kdist.cluster.streams import STDIN, Channels
from kdist.errors import KdistError
from tests.cli.cluster.api import Api, Reply, write_kubeconfig
from tests.patience import soon

SUCCESS = b'{"status": "Success"}'


@pytest.fixture(name="api")
def serve() -> Iterator[Api]:
    """A server whose commands write what they read, once they have read all of it."""
    reply = Reply(channels=lambda sent: {1: sent, 3: SUCCESS})
    with closing(Api(lambda _: reply)) as served:
        yield served


@pytest.fixture(name="found")
def find_cluster(api: Api, tmp_path: Path) -> Cluster:
    """A connection to the server."""
    write_kubeconfig(tmp_path / "config", api.url)
    return connect(None, "ml", file=str(tmp_path / "config"))


def test_an_error_of_what_is_fed_or_of_what_receives_closes_the_connection(
    api: Api, found: Cluster
) -> None:
    def fail(*_: object) -> Iterator[bytes]:
        yield b"1"
        raise KeyboardInterrupt

    def refuse(_: bytes) -> None:
        raise KdistError("too much")

    cases: list[tuple[type[BaseException], dict[str, Any]]] = [
        (KeyboardInterrupt, {"feed": fail()}),
        (KdistError, {"feed": iter([b"1"]), "out": refuse}),
        (KdistError, {"feed": iter([b"1"]), "timeout": 0.0}),
    ]
    held = []  # with what their tracebacks refer to, or that would be closed as garbage
    for error, how in cases:
        with pytest.raises(error) as caught:
            found.exec("pod", ["cat"], **how)
        held.append(caught)
    assert found.exec("pod", ["cat"], feed=iter([b"1"]), out=lambda _: None) == 0
    assert soon(lambda: all(each.fileno() == -1 for each in api.connections))


def test_a_connection_that_is_lost_is_not_an_error_of_what_is_sent(api: Api) -> None:
    url = f"{api.url.replace('http', 'ws')}/exec?stdin=true"
    channels = Channels(create_connection(url, subprotocols=["v5.channel.k8s.io"]))
    channels.close()
    channels.write(STDIN, b"1")
    channels.end(STDIN)
    channels.update()
    assert not channels.is_open()


def test_a_connection_that_the_server_ends_is_closed_once_that_is_answered() -> None:
    near, far = socket.socketpair()
    connection = WebSocket()
    connection.sock, connection.connected = near, True
    channels = Channels(connection)
    with far:
        far.settimeout(10)
        far.sendall(ABNF.create_frame(b"", ABNF.OPCODE_CLOSE).format())
        channels.update(10)
        assert not channels.is_open()
        assert far.recv(1)[0] & 0x0F == ABNF.OPCODE_CLOSE
        while far.recv(1 << 10):
            pass  # up to its end

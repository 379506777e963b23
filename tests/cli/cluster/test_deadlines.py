"""An API server that cannot be trusted: whatever it does, each request ends within its deadline,
with an error that says what was asked of whom.
"""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kdist import cluster
from kdist.cluster import Cluster, kubeconfig, streams, watch
from kdist.errors import Code, KdistError
from tests import hostile
from tests.cli.cluster.api import write_kubeconfig

SECONDS = 0.3
REQUESTS: dict[str, Callable[[Cluster], object]] = {
    "get /version": lambda cluster: cluster.version(),
    "get pods/a": lambda cluster: cluster.get("v1", "Pod", "a"),
    "list pods": lambda cluster: cluster.list("v1", "Pod"),
    "pod/a": lambda cluster: cluster.proxy("a", 9401, "/status", timeout=SECONDS),
    "read the log of pod/a": lambda cluster: list(cluster.logs("a")),
    "watch pods": lambda cluster: list(cluster.watch("v1", "Pod", timeout=SECONDS)),
    "exec in pod/a": lambda cluster: cluster.run("a", ["true"], timeout=SECONDS),
    "forward port 80 of pod/a": lambda cluster: cluster.check_forward("a", 80),
}


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Cluster]:
    """`connect(url)` connects without patience."""
    monkeypatch.setattr(kubeconfig, "CONNECT_SECONDS", SECONDS)
    monkeypatch.setattr(streams, "_FRAME_SECONDS", SECONDS)
    monkeypatch.setattr(watch, "ROUND_SECONDS", SECONDS)
    monkeypatch.setattr(watch, "SILENCE_SECONDS", SECONDS)

    def make(url: str) -> Cluster:
        write_kubeconfig(tmp_path / "kubeconfig", url, cluster={"insecure-skip-tls-verify": True})
        file = str(tmp_path / "kubeconfig")
        return cluster.connect(file=file, retry_seconds=0.0, request_timeout=SECONDS)

    return make


def refuse(ask: Callable[[Cluster], object], connection: Cluster) -> KdistError:
    """The error that a request ends with, long before a hostile server ends."""
    began = time.monotonic()
    with pytest.raises(KdistError) as raised:
        ask(connection)
    assert time.monotonic() - began < hostile.LIFE_SECONDS / 2
    return raised.value


LEGAL = {
    ("pod/a", hostile.nest_deeply),  # whoever asked for the body parses it
    ("read the log of pod/a", hostile.nest_deeply),  # a line like any other
    ("read the log of pod/a", hostile.send_without_end),  # a log has no largest size
}
MATRIX = [
    pytest.param(what, behaviour, id=f"{what}-{behaviour.__name__}")
    for what in REQUESTS
    for behaviour in hostile.BEHAVIOURS
    if behaviour is not hostile.send_much and (what, behaviour) not in LEGAL
]


@pytest.mark.sampled
@pytest.mark.parametrize(("what", "behaviour"), MATRIX)
def test_a_hostile_server_is_given_up_within_the_deadline(
    what: str, behaviour: hostile.Behaviour, connect: Callable[[str], Cluster]
) -> None:
    with hostile.serve(behaviour) as server:
        url = f"http://127.0.0.1:{server.port}"
        error = refuse(REQUESTS[what], connect(url))
    # a watch begins with a list
    assert any(each in str(error) for each in (url, what, what.replace("watch", "list")))


@pytest.mark.parametrize("what", REQUESTS)
def test_no_redirect_of_an_api_server_is_followed(
    what: str, connect: Callable[[str], Cluster]
) -> None:
    with (
        hostile.serve(hostile.answer(b"{}")) as other,
        hostile.serve(hostile.redirect_to(other.port)) as server,
    ):
        refuse(REQUESTS[what], connect(f"http://127.0.0.1:{server.port}"))
        assert other.connections == 0, "the token would have been sent to another server"


@pytest.mark.parametrize("behaviour", [hostile.drip_headers, hostile.drip_body])
@pytest.mark.parametrize("what", ["get /version", "exec in pod/a"])
def test_deadlines_hold_over_tls_too(
    behaviour: hostile.Behaviour, what: str, connect: Callable[[str], Cluster], tmp_path: Path
) -> None:
    with hostile.serve(behaviour, tls=make_tls(tmp_path)) as server:
        refuse(REQUESTS[what], connect(f"https://127.0.0.1:{server.port}"))
        assert server.connections == 1


def make_tls(folder: Path) -> ssl.SSLContext:
    """A server's context with a certificate of its own."""
    file = folder / "server.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -days 1"
    words = [*command.split(), "-keyout", str(file), "-out", str(folder / "only.pem")]
    subprocess.run(words, check=True, capture_output=True)
    file.write_text(file.read_text() + (folder / "only.pem").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


def test_a_log_may_take_longer_as_long_as_it_comes(connect: Callable[[str], Cluster]) -> None:
    def slow_log(connection: hostile.Connection, closed: hostile.Closed) -> None:
        hostile.read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for second in range(10, 20):
            connection.sendall(b"2026-01-01T00:00:%dZ " % second + b"x" * 4096 + b"\n")
            closed.wait(SECONDS / 3)

    with hostile.serve(slow_log) as server:
        found = connect(f"http://127.0.0.1:{server.port}")
        assert len(list(found.logs("a"))) == 10


def test_a_request_that_ends_in_time_is_no_unreachable_server(
    connect: Callable[[str], Cluster],
) -> None:
    with hostile.serve(hostile.answer(b'{"gitVersion": "v1.30.0"}')) as server:
        found = connect(f"http://127.0.0.1:{server.port}")
        assert found.version() == {"gitVersion": "v1.30.0"}
    with hostile.serve(hostile.drip_body) as server:
        error = refuse(REQUESTS["get /version"], connect(f"http://127.0.0.1:{server.port}"))
        assert error.code == Code.UNREACHABLE
        assert "timed out" in str(error)

"""The endpoint on a hostile network: read-only, bounded, and it discloses nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdist_trainer.metrics.exporter import Exporter
from kdist_trainer.metrics.transport import Reporter
from kdist_trainer.network import server as bounds
from tests.trainer.metrics.scrape import (
    exporting,
    fetch,
    full_stats,
    read,
    record_everything,
    total,
)

PATHS = ["/metrics", "/healthz", "/readyz", "/status"]


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Exporter]:
    with exporting(tmp_path) as exporter:
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        exporter.set_state("running")
        yield exporter


def exchange(port: int, request: bytes) -> bytes:
    """Send these bytes and return the response, which may be empty."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        received = b""
        try:
            connection.sendall(request)
            while part := connection.recv(65_536):
                received += part
        except ConnectionError:  # it was closed before all of the request was sent
            pass
        return received


def answers(port: int) -> bool:
    return fetch(port, "/healthz")[0] == 200


@pytest.mark.parametrize("path", PATHS)
def test_head_has_the_headers_of_get_and_no_body(exporter: Exporter, path: str) -> None:
    status, body, headers = fetch(exporter.port, path)
    assert (status, len(body)) == (200, int(headers["content-length"]))
    head_status, head_body, head_headers = fetch(exporter.port, path, method="HEAD")
    assert head_status == 200
    assert head_body == ""
    assert head_headers["content-type"] == headers["content-type"]


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "<script>"]
)
@pytest.mark.parametrize("path", ["/metrics", "/nothing"])
def test_only_reading_is_allowed(exporter: Exporter, method: str, path: str) -> None:
    answer = exchange(
        exporter.port,
        f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
    )
    assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/../etc/passwd",
        "/metrics/../../etc/passwd",
        "/%2e%2e/etc/passwd",
        "//metrics",
        "/metrics/",
        "/METRICS",
        "/status/x",
        "/\x00",
    ],
)
def test_every_other_path_is_not_found_and_never_echoed(exporter: Exporter, path: str) -> None:
    answer = exchange(exporter.port, f"GET {path} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert answer.endswith(b"\r\n\r\nnot found\n")


def test_a_query_is_ignored(exporter: Exporter) -> None:
    assert fetch(exporter.port, "/healthz?name[]=x")[:2] == (200, "ok\n")


@pytest.mark.parametrize(
    "request_head",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics SMTP\r\n\r\n",
        b"GET http://evil/metrics HTTP/1.1\r\n\r\n",
        b"GET  /metrics HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00 \x00 \x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n",
    ],
)
def test_a_malformed_request_is_rejected(exporter: Exporter, request_head: bytes) -> None:
    assert exchange(exporter.port, request_head).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize(
    "accept",
    ["\xff\x00", ";;;=,,", "application/openmetrics-text;version=9", "text/plain;q=x", "*" * 4000],
)
def test_an_unknown_accept_header_still_gets_metrics(exporter: Exporter, accept: str) -> None:
    answer = exchange(
        exporter.port, b"GET /metrics HTTP/1.1\r\nAccept: " + accept.encode("latin-1") + b"\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "head", [b"GET /" + b"a" * 100_000, b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 20_000]
)
def test_a_request_with_huge_headers_is_rejected(exporter: Exporter, head: bytes) -> None:
    answer = exchange(exporter.port, head + b"\r\n\r\n")
    # the connection may be gone before the answer is read
    assert answer[:12] in {b"", b"HTTP/1.1 431"}
    assert answers(exporter.port)


def test_a_connection_without_a_request_is_closed_without_a_response(exporter: Exporter) -> None:
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=60) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


@pytest.mark.sampled
def test_a_client_that_sends_its_request_slowly_is_dropped_at_the_deadline(
    exporter: Exporter,
) -> None:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=60) as connection:
        connection.settimeout(0.2)
        ended = False
        while not ended:
            try:
                connection.sendall(b"X")
                ended = connection.recv(1) == b""
            except TimeoutError:
                assert answers(exporter.port)
            except ConnectionError:
                ended = True
            assert time.monotonic() - began < 60
    assert time.monotonic() - began >= bounds.SECONDS * 0.9


def test_many_idle_clients_do_not_block_a_probe(exporter: Exporter) -> None:
    idle = [
        socket.create_connection(("127.0.0.1", exporter.port), timeout=60)
        for _ in range(bounds.STRANGERS + 60)
    ]
    try:
        assert answers(exporter.port)
    finally:
        for connection in idle:
            connection.close()


def test_what_is_refused_is_counted_and_shown(exporter: Exporter) -> None:
    idle = [
        socket.create_connection(("127.0.0.1", exporter.port), timeout=60)
        for _ in range(bounds.STRANGERS + 60)
    ]
    exporter.sources.refused = lambda: {"token": 5, "timeout": 7}
    document = json.loads(fetch(exporter.port, "/status")[1])
    samples = read(fetch(exporter.port, "/metrics")[1])
    for connection in idle:
        connection.close()
    assert document["connections_refused"] >= 65
    name = "kdist_connections_refused_total"
    assert total(samples, name, server="metrics", reason="limit") >= 60
    assert total(samples, name, server="exchange", reason="token") == 5
    assert total(samples, name, server="exchange", reason="timeout") == 7


def test_a_client_that_does_not_read_its_response_blocks_nobody(exporter: Exporter) -> None:
    deaf = []
    for _ in range(20):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", exporter.port))
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        deaf.append(connection)
    try:
        assert answers(exporter.port)
    finally:
        for connection in deaf:
            connection.close()


def test_a_hundred_scrapes_at_once_are_all_answered(exporter: Exporter) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch(exporter.port, "/metrics")[0]))
        for _ in range(100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [200] * 100


def test_nothing_of_the_environment_or_the_disk_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "canary-1f2e")
    with exporting(tmp_path) as exporter:
        exporter.set_group(generation=1, world_size=1, local_ranks=[0])
        record_everything(exporter)
        for path in PATHS:
            text = " ".join(map(str, fetch(exporter.port, path)))
            assert "canary-1f2e" not in text
            assert str(tmp_path) not in text


def test_a_bug_in_a_handler_fails_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exporting(tmp_path) as exporter:
        monkeypatch.setattr(exporter, "_healthy", lambda: 1 // 0)
        assert fetch(exporter.port, "/healthz")[:2] == (500, "internal server error\n")
        assert fetch(exporter.port, "/metrics")[0] == 200


def test_healthz_reports_whether_the_agent_is_alive_and_readyz_whether_it_trains(
    tmp_path: Path,
) -> None:
    alive = True
    made = Exporter(
        job="digits",
        run_id="r",
        socket_path=tmp_path / "s",
        port=0,
        addresses=["127.0.0.1"],
        info={},
        healthy=lambda: alive,
    )
    made.start()
    try:
        assert fetch(made.port, "/healthz")[0] == 200
        assert fetch(made.port, "/readyz")[:2] == (503, "pending\n")
        made.set_state("running")
        alive = False
        assert fetch(made.port, "/healthz")[0] == 503
        assert fetch(made.port, "/readyz")[:2] == (200, "running\n")
    finally:
        made.close()


def test_an_ipv6_address_can_be_listened_on(tmp_path: Path) -> None:
    made = Exporter(
        job="digits", run_id="r", socket_path=tmp_path / "s", port=0, addresses=["::1"], info={}
    )
    made.start()
    try:
        with socket.create_connection(("::1", made.port), timeout=60) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
    finally:
        made.close()


def test_status_is_strict_json(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    stats = full_stats(0)
    stats.loss = float("nan")
    monkeypatch.setenv("KDIST_METRICS_SOCKET", str(exporter.socket_path))
    Reporter(stats).close()
    document = json.loads(fetch(exporter.port, "/status")[1], parse_constant=refuse)
    assert document["loss"] == "nan"
    assert document["step"] == 100
    assert document["target_steps"] == 200
    assert document["last_checkpoint_step"] == 100
    assert (document["checkpoint_interval"], document["checkpoint_bytes"]) == (300.0, 10_000)
    assert set(document) == {
        *(
            "format",
            "job",
            "run_id",
            "node",
            "state",
            "phase",
            "generation",
            "world_size",
            "step",
            "target_steps",
            "loss",
        ),
        *(
            "learning_rate",
            "samples_per_second",
            "restarts",
            "restarts_remaining",
            "last_checkpoint_step",
        ),
        *("last_checkpoint_time", "lost_steps", "wall_seconds", "ranks", "pid", "exit", "nodes"),
        "at_risk_seconds",
        "peers",
        "connections_refused",
        "rendezvous_refused",
        "rendezvous_refusal",
        "exchange_key",
        "last_failure",
        "failed_saves",
        *("devices", "tracker"),
        "checkpoint_room",
        "checkpoint_interval",
        "checkpoint_bytes",
        *("waiting_for", "slow_start", "machine_faults"),
    }


def test_status_shows_the_agents_that_this_one_hears_until_its_work_is_over(
    exporter: Exporter,
) -> None:
    peers = {"heard": ["10.0.0.1"], "silent": [], "age_seconds": 0.5}
    assert json.loads(fetch(exporter.port, "/status")[1])["peers"] is None
    exporter.sources.peers = lambda: peers
    assert json.loads(fetch(exporter.port, "/status")[1])["peers"] == peers
    exporter.set_exit_record({"outcome": "failed", "code": 201})
    assert json.loads(fetch(exporter.port, "/status")[1])["peers"] is None


@pytest.mark.parametrize("has_key", [True, False, None])
def test_status_shows_whether_the_key_of_the_exchange_is_there(
    exporter: Exporter, has_key: bool | None
) -> None:
    exporter.sources.has_key = lambda: has_key
    assert json.loads(fetch(exporter.port, "/status")[1])["exchange_key"] is has_key


def test_status_shows_the_exit_record_of_an_agent_that_stays_alive(
    exporter: Exporter,
) -> None:
    assert json.loads(fetch(exporter.port, "/status")[1])["exit"] is None
    record = {"outcome": "failed", "code": 70, "message": "ValueError: odd", "traceback": ["line"]}
    exporter.set_exit_record(record)
    document = json.loads(fetch(exporter.port, "/status")[1])
    assert (document["state"], document["phase"], document["exit"]) == ("failed", "failed", record)
    assert fetch(exporter.port, "/readyz")[0] == 503

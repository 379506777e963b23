"""Asking agents for their status: answers that come, come late, or never come."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kdist.local import agents
from kdist.local.agents import StatusPoller

PATIENCE = 30.0

Serve = Callable[[bytes, int], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server of one body and status: `serve(b"{}", 200)` is its port."""
    servers: list[ThreadingHTTPServer] = []

    def start(body: bytes, status: int) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Keep the test's output clean."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return int(servers[-1].server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def note(scratch: Path, port: int) -> Path:
    scratch.mkdir(exist_ok=True)
    (scratch / "agent.json").write_text(json.dumps({"port": port, "pid": 1}))
    return scratch


def test_a_status_is_read_where_the_agent_says_it_listens(serve: Serve, tmp_path: Path) -> None:
    poller = StatusPoller(
        {"node-0": note(tmp_path / "node-0", serve(b'{"step": 5}', 200))}, every=0.01
    )
    poller.start()
    wait_for(
        lambda: (
            poller.answers().get("node-0") is not None
            and poller.answers()["node-0"].answered_at is not None
        )
    )
    poller.close()
    assert poller.answers()["node-0"].status == {"step": 5}


@pytest.mark.parametrize(
    ("body", "status"), [(b"{}", 503), (b"not json", 200), (b"[]", 200), (b"", 200)]
)
def test_an_answer_that_is_no_status_is_none(serve: Serve, body: bytes, status: int) -> None:
    assert agents.ask(serve(body, status)) is None


@pytest.mark.parametrize("port", [None, "80", 0, 70000])
def test_a_port_that_is_none_gives_no_status(port: object) -> None:
    assert agents.ask(port) is None


def test_an_agent_that_accepts_and_stays_silent_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert agents.ask(silent.getsockname()[1]) is None
    assert time.monotonic() - began < 60


def test_an_agent_that_went_away_keeps_its_last_answer_and_its_silence_grows(
    serve: Serve, tmp_path: Path
) -> None:
    scratch = note(tmp_path / "node-0", serve(b'{"step": 5}', 200))
    poller = StatusPoller({"node-0": scratch}, every=0.01)
    poller.start()
    wait_for(
        lambda: (
            poller.answers().get("node-0") is not None
            and poller.answers()["node-0"].answered_at is not None
        )
    )
    (scratch / "agent.json").unlink()
    wait_for(lambda: poller.answers()["node-0"].silence(time.monotonic()) > 0.2)
    poller.close()
    assert poller.answers()["node-0"].status == {"step": 5}


def test_one_silent_agent_does_not_hold_up_the_others(serve: Serve, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        scratch = {
            "node-0": note(tmp_path / "node-0", silent.getsockname()[1]),
            "node-1": note(tmp_path / "node-1", serve(b'{"step": 5}', 200)),
        }
        poller = StatusPoller(scratch, every=0.01)
        poller.start()
        wait_for(
            lambda: (
                "node-1" in poller.answers() and poller.answers()["node-1"].status == {"step": 5}
            )
        )
        poller.close()
        assert poller.answers().get("node-0") is None or poller.answers()["node-0"].status == {}

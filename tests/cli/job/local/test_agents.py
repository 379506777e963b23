"""Polling the agents of a local run: replies that come, come late, or never come."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kdist.job.local.agents import StatusPoller
from tests.cli.conftest import ServeAgent

PATIENCE = 30.0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def note(scratch: Path, port: int) -> Path:
    scratch.mkdir(exist_ok=True)
    (scratch / "agent.json").write_text(json.dumps({"port": port, "pid": 1}))
    return scratch


def test_a_status_is_read_where_the_agent_says_it_listens(
    serve_agent: ServeAgent, tmp_path: Path
) -> None:
    poller = StatusPoller(
        {"node-0": note(tmp_path / "node-0", serve_agent(b'{"step": 5}', 200))}, interval=0.01
    )
    poller.start()
    wait_for(
        lambda: (
            poller.replies().get("node-0") is not None
            and poller.replies()["node-0"].answered_at is not None
        )
    )
    poller.close()
    assert poller.replies()["node-0"].status == {"step": 5}


def test_an_agent_that_went_away_keeps_its_last_answer_and_its_silence_grows(
    serve_agent: ServeAgent, tmp_path: Path
) -> None:
    scratch = note(tmp_path / "node-0", serve_agent(b'{"step": 5}', 200))
    poller = StatusPoller({"node-0": scratch}, interval=0.01)
    poller.start()
    wait_for(
        lambda: (
            poller.replies().get("node-0") is not None
            and poller.replies()["node-0"].answered_at is not None
        )
    )
    (scratch / "agent.json").unlink()
    wait_for(lambda: poller.replies()["node-0"].silence(time.monotonic()) > 0.2)
    poller.close()
    assert poller.replies()["node-0"].status == {"step": 5}


def test_one_silent_agent_does_not_hold_up_the_others(
    serve_agent: ServeAgent, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        scratch = {
            "node-0": note(tmp_path / "node-0", silent.getsockname()[1]),
            "node-1": note(tmp_path / "node-1", serve_agent(b'{"step": 5}', 200)),
        }
        poller = StatusPoller(scratch, interval=0.01)
        poller.start()
        wait_for(
            lambda: (
                "node-1" in poller.replies() and poller.replies()["node-1"].status == {"step": 5}
            )
        )
        poller.close()
        assert poller.replies().get("node-0") is None or poller.replies()["node-0"].status == {}

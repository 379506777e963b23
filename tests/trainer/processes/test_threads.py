"""A thread that fails is logged, and starts again or ends the process; its caller sees the rest."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kdist_trainer import log
from kdist_trainer.processes import threads
from kdist_trainer.processes.threads import BackgroundTask, OnError, start_thread
from kdist_trainer.rendezvous.exchange import ExchangeHost
from kdist_trainer.rendezvous.membership import MemberConnection
from tests.patience import soon

SECONDS = 60.0


@pytest.fixture
def events() -> Any:
    """The events of this process, as they are logged."""
    found: list[dict[str, Any]] = []
    log.write_to(lambda line: found.append(json.loads(line)))
    yield found
    log.write_to(None)


def fails_twice(done: threading.Event) -> Callable[[], None]:
    """A loop that raises in its first two runs and then does its work."""
    errors = [KeyError("first"), SystemExit(3)]

    def run() -> None:
        if errors:
            raise errors.pop(0)
        done.set()

    return run


def test_a_loop_that_raises_is_logged_and_starts_again(events: list[dict[str, Any]]) -> None:
    done = threading.Event()
    thread = start_thread(fails_twice(done), name="keeper", on_error=OnError.RESTART)
    assert done.wait(SECONDS)
    thread.join(SECONDS)
    assert [each["error"] for each in events] == ["KeyError: 'first'", "SystemExit: 3"]
    assert {(each["event"], each["thread"], each["level"], each["then"]) for each in events} == {
        ("thread-failed", "keeper", "error", "restart")
    }
    assert any("raise errors.pop(0)" in line for line in events[0]["traceback"])


def test_a_thread_that_others_can_do_without_is_reported_once(events: list[dict[str, Any]]) -> None:
    start_thread(lambda: 1 / 0, name="extra", on_error=OnError.REPORT).join(SECONDS)
    assert [(each["thread"], each["then"]) for each in events] == [("extra", "report")]


def test_a_process_that_loses_a_thread_it_needs_ends_and_says_why() -> None:
    code = (
        "import time\nfrom kdist_trainer.processes.threads import OnError, start_thread\n"
        "start_thread(lambda: {}['gone'], name='needed', on_error=OnError.EXIT)\n"
        "time.sleep(600)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert found.returncode == 1
    assert "thread needed has failed, the process ends: KeyError: 'gone'" in found.stderr


def test_a_thread_starts_once_the_system_has_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, [1, 1]

    def refuse(thread: threading.Thread) -> None:
        if refused:
            refused.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = threading.Event()
    start_thread(done.set, name="late", on_error=OnError.REPORT)
    assert done.wait(SECONDS)


def test_a_thread_without_end_of_threads_raises_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(threads, "_START_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread(lambda: None, name="never", on_error=OnError.REPORT)


def test_the_error_of_a_save_in_the_background_reaches_the_training() -> None:
    task = BackgroundTask[int]()
    task.start(lambda: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        task.collect()
    task.start(lambda: 7)
    assert task.collect() == 7


def test_a_member_still_hears_its_host_after_a_line_of_another_shape(
    events: list[dict[str, Any]],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = ExchangeHost(1, "127.0.0.1", server.getsockname()[1], "token", 0)
        member = MemberConnection(host, 1)
        answer(server, b"17\n")
        answer(server, b"[[2], [], [], null]\n")
        assert soon(lambda: member.disconnected() >= {2}, SECONDS)
        member.leave()
    assert re.match("TypeError: ", events[0]["error"])
    assert events[0]["thread"] == "kdist-membership"


def answer(server: socket.socket, line: bytes) -> None:
    """Accept the member's connection, send it one line, and read until it has answered or gone."""
    server.settimeout(SECONDS)
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as lines:
        connection.settimeout(SECONDS)
        assert b"token" in lines.readline()
        assert b'"member"' in lines.readline()
        connection.sendall(line + line)
        lines.readline()

"""The program that hurts a node, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.drill.target import program_source

PATIENCE = 30.0
LONG = "600"
AGENT = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                          env={**os.environ, "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
print(*(rank.pid for rank in ranks), flush=True)
for rank in ranks:
    rank.wait()
time.sleep(600)
"""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="drills need Linux"),
]


class Agent:
    """A process with two children, in the place of an agent with two ranks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.ranks = [int(word) for word in self.process.stdout.readline().split()]
        self.pids = [self.process.pid, *self.ranks]

    def close(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def agent() -> Iterator[Agent]:
    found = Agent()
    yield found
    found.close()


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program_source(), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def run(*arguments: object) -> dict[str, Any]:
    with start(*arguments) as process:
        return answer(process)


def state(pid: int) -> str:
    """T for a stopped process, Z or nothing for one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def ended(pid: int) -> bool:
    return state(pid) in ("", "Z")


def test_one_rank_is_killed_by_the_environment_that_it_was_started_with(
    agent: Agent, tmp_path: Path
) -> None:
    options = ("--agent", agent.process.pid, "--scratch", tmp_path)
    said = run("kill-rank", *options, "--local-rank", 1)
    assert said == {"state": "struck", "pids": [agent.ranks[1]]}
    wait_until(lambda: ended(agent.ranks[1]), "rank 1 ends")
    assert not ended(agent.ranks[0])
    assert "local rank 5" in run("kill-rank", *options, "--local-rank", 5)["reason"]


def test_one_rank_is_killed_by_its_heartbeat_unless_the_process_is_another_agents(
    agent: Agent, tmp_path: Path
) -> None:
    options = ("--agent", agent.process.pid, "--scratch", tmp_path)
    heartbeat = tmp_path / "rank-0.heartbeat"
    heartbeat.write_bytes(struct.pack("<QQ", agent.ranks[1], 3) + bytes(64))
    assert run("kill-rank", *options)["pids"] == [agent.ranks[1]]
    heartbeat.write_bytes(struct.pack("<QQ", os.getpid(), 3) + bytes(64))
    assert run("kill-rank", *options)["pids"] == [agent.ranks[0]]


def test_an_agent_is_killed_alone_or_with_its_ranks(agent: Agent) -> None:
    assert run("kill-agent", "--agent", agent.process.pid)["pids"] == [agent.process.pid]
    agent.process.wait(PATIENCE)
    assert not any(ended(pid) for pid in agent.ranks)
    assert "does not run" in run("kill-agent", "--agent", agent.process.pid)["reason"]
    other = Agent()
    try:
        assert sorted(run("kill-node", "--agent", other.process.pid)["pids"]) == sorted(other.pids)
        wait_until(lambda: all(ended(pid) for pid in other.pids), "all of the node ends")
    finally:
        other.close()


def test_a_silent_node_wakes_up_after_its_time(agent: Agent) -> None:
    with start("silence", "--agent", agent.process.pid, "--seconds", 0.2) as process:
        assert sorted(answer(process)["pids"]) == sorted(agent.pids)
        assert answer(process) == {"state": "over"}
    assert all(state(pid) == "S" for pid in agent.pids)


@pytest.mark.parametrize("way", ["close", "terminate"])
def test_a_silent_node_wakes_up_when_whoever_has_silenced_it_goes_away(
    agent: Agent, way: str
) -> None:
    with start("silence", "--agent", agent.process.pid, "--seconds", LONG) as process:
        answer(process)
        wait_until(lambda: all(state(pid) == "T" for pid in agent.pids), "all are stopped")
        assert process.stdin is not None
        getattr(process.stdin if way == "close" else process, way)()
        wait_until(lambda: all(state(pid) == "S" for pid in agent.pids), "all go on")


def test_what_a_killed_program_has_stopped_is_woken_by_another(agent: Agent) -> None:
    with start("silence", "--agent", agent.process.pid, "--seconds", LONG) as process:
        answer(process)
        process.kill()
    wait_until(lambda: all(state(pid) == "T" for pid in agent.pids), "all are stopped")
    assert run("wake", "--agent", agent.process.pid)["state"] == "over"
    wait_until(lambda: all(state(pid) == "S" for pid in agent.pids), "all go on")

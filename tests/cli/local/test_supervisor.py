"""The kubelet with real processes that end in every way an agent can."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist.local import supervisor as kubelets
from kdist.local.supervisor import AgentCommand, Outcome, Supervisor

ACTING = Path(__file__).parent / "acting.py"
PATIENCE = 60.0

pytestmark = pytest.mark.processes

Told = list[tuple[str, str, dict[str, Any]]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def make(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Supervisor]]:
    """Kubelet of agents that act what is given for each: `make(["201", "0"], ["wait"])`."""
    monkeypatch.setattr(kubelets, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(kubelets, "SETTLE_SECONDS", 0.5)
    made: list[Supervisor] = []

    def tell(node: str, event: str, /, **fields: object) -> None:
        told.append((node, event, fields))

    def build(*acts: list[str], grace_seconds: float = 20, backstop: int = 8) -> Supervisor:
        commands = [
            AgentCommand(
                f"node-{index}",
                [sys.executable, str(ACTING), str(tmp_path / f"starts-{index}"), "-", *ends],
                dict(os.environ),
                tmp_path,
                tmp_path / f"log-{index}",
            )
            for index, ends in enumerate(acts)
        ]
        made.append(Supervisor(commands, grace_seconds=grace_seconds, backstop=backstop, tell=tell))
        return made[-1]

    yield build
    for each in made:
        each.close()


def finish(kubelet: Supervisor) -> Outcome:
    end = time.monotonic() + PATIENCE
    while kubelet.poll():
        assert time.monotonic() < end, "the agents did not end"
        time.sleep(0.01)
    return kubelet.outcome


def wait_ready(tmp_path: Path, kubelet: Supervisor, *indices: int) -> None:
    """Until these agents have installed their handlers."""
    end = time.monotonic() + PATIENCE
    logs = [tmp_path / f"log-{index}" for index in indices]
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert kubelet.poll()
        assert time.monotonic() < end, "the agents did not start"
        time.sleep(0.01)


def starts(tmp_path: Path, index: int) -> int:
    return int((tmp_path / f"starts-{index}").read_text())


def test_a_job_is_done_when_every_agent_ends_with_zero(make: Callable[..., Supervisor]) -> None:
    kubelet = make(["0"], ["0"])
    kubelet.start()
    assert finish(kubelet) == Outcome("done", 0)


@pytest.mark.parametrize("end", ["128", "201", "202", "203", "kill"])
def test_an_agent_that_may_try_again_is_started_again(
    make: Callable[..., Supervisor], tmp_path: Path, end: str
) -> None:
    kubelet = make([end, end, "0"])
    kubelet.start()
    assert finish(kubelet) == Outcome("done", 0)
    assert starts(tmp_path, 0) == 3


@pytest.mark.parametrize("code", [1, 64, 70, 75, 127])
def test_a_code_below_128_fails_the_job_and_stops_the_other_agents(
    make: Callable[..., Supervisor], tmp_path: Path, code: int
) -> None:
    kubelet = make(["wait"], [str(code)])
    kubelet.start()
    assert finish(kubelet) == Outcome("failed", code, "node-1")
    assert starts(tmp_path, 1) == 1, "no second try"


def test_the_pause_before_a_restart_doubles_and_progress_sets_it_back(
    make: Callable[..., Supervisor], told: Told
) -> None:
    kubelet = make(["201"], backstop=3)
    kubelet.start()
    finish(kubelet)
    assert [fields["seconds"] for _, event, fields in told if event == "agent-restarting"] == [
        0.05,
        0.1,
        0.2,
    ]


def test_an_agent_that_only_dies_is_given_up_in_the_end(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    kubelet = make(["kill"], backstop=2)
    kubelet.start()
    assert finish(kubelet) == Outcome("failed", -9, "node-0")
    assert starts(tmp_path, 0) == 3


def test_progress_refills_the_patience_with_an_agent(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    kubelet = make(["201", "201", "201", "0"], backstop=1)
    kubelet.start()
    end = time.monotonic() + PATIENCE
    while kubelet.poll():
        assert time.monotonic() < end
        kubelet.note_progress()
        time.sleep(0.01)
    assert kubelet.outcome == Outcome("done", 0)
    assert starts(tmp_path, 0) == 4


def test_a_stop_asks_every_agent_to_save_and_none_is_started_again(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    kubelet = make(["wait"], ["wait"])
    kubelet.start()
    wait_ready(tmp_path, kubelet, 0, 1)
    kubelet.stop()
    assert finish(kubelet) == Outcome("stopped", 200, "node-1")
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (1, 1)


def test_a_second_request_ends_agents_that_do_not_listen(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    kubelet = make(["deaf"], ["wait"])
    kubelet.start()
    wait_ready(tmp_path, kubelet, 0, 1)
    kubelet.stop()
    assert kubelet.poll(), "the deaf agent is still there"
    kubelet.kill()
    assert finish(kubelet).kind == "killed"


def test_an_agent_that_does_not_stop_within_the_grace_is_killed(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    kubelet = make(["deaf"], grace_seconds=0.3)
    kubelet.start()
    wait_ready(tmp_path, kubelet, 0)
    kubelet.stop()
    assert finish(kubelet) == Outcome("killed", -9, "node-0")


def test_a_stop_while_an_agent_waits_for_its_restart_ends_the_job(
    make: Callable[..., Supervisor], told: Told
) -> None:
    kubelet = make(["201"], backstop=99)
    kubelet.start()
    end = time.monotonic() + PATIENCE
    while not any(event == "agent-restarting" for _, event, _ in told):
        assert kubelet.poll()
        assert time.monotonic() < end
        time.sleep(0.01)
    kubelet.stop()
    assert finish(kubelet).kind == "stopped"


def test_a_failure_while_stopping_is_still_a_failure(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    kubelet = make(["wait"], ["wait70"])
    kubelet.start()
    wait_ready(tmp_path, kubelet, 0, 1)
    kubelet.stop()
    assert finish(kubelet) == Outcome("failed", 70, "node-1")


def test_agents_live_in_sessions_of_their_own_so_ctrl_c_reaches_kdist_alone(
    make: Callable[..., Supervisor], tmp_path: Path, told: Told
) -> None:
    kubelet = make(["wait"], ["wait"])
    kubelet.start()
    pids = [int(fields["pid"]) for _, event, fields in told if event == "agent-started"]
    assert [os.getsid(pid) for pid in pids] == pids
    assert [os.getpgid(pid) for pid in pids] == pids


DAEMON = """
import os, pathlib, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path("daemon").write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not (pathlib.Path("daemon").exists() and pathlib.Path("daemon").read_text()):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_daemon_that_an_agent_leaves_behind_is_killed_before_the_agent_starts_again(
    tmp_path: Path,
) -> None:
    told: Told = []
    environment = {**os.environ, "KDIST_SCRATCH": str(tmp_path / "node-0")}
    command = AgentCommand(
        "node-0", [sys.executable, "-c", DAEMON], environment, tmp_path, tmp_path / "log"
    )

    def tell(node: str, event: str, /, **fields: object) -> None:
        told.append((node, event, fields))

    kubelet = Supervisor([command], grace_seconds=20, backstop=0, tell=tell)
    kubelet.start()
    assert finish(kubelet) == Outcome("failed", -9, "node-0")
    daemon = Path("/proc", (tmp_path / "daemon").read_text())
    assert not daemon.exists() or " Z " in (daemon / "stat").read_text(), (
        "gone when its agent's end is told"
    )

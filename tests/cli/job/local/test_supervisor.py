"""The supervisor with real processes that end in every way an agent can."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kdist.job.local import supervisor as supervisor_module
from kdist.job.local.supervisor import AgentCommand, Outcome, SignalQueue, Supervisor

ACTING = Path(__file__).parent / "acting.py"
PATIENCE = 60.0

pytestmark = pytest.mark.processes

Told = list[tuple[str, str, dict[str, Any]]]


@pytest.fixture
def reported() -> Told:
    return []


@pytest.fixture
def make(
    tmp_path: Path, reported: Told, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Supervisor]]:
    """Kubelet of agents that act what is given for each: `make(["201", "0"], ["wait"])`."""
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(supervisor_module, "FAILURE_GRACE_SECONDS", 0.5)
    made: list[Supervisor] = []

    def tell(node: str, event: str, /, **fields: object) -> None:
        reported.append((node, event, fields))

    def build(*acts: list[str], grace_seconds: float = 20, max_restarts: int = 8) -> Supervisor:
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
        made.append(
            Supervisor(
                commands, grace_seconds=grace_seconds, max_restarts=max_restarts, on_event=tell
            )
        )
        return made[-1]

    yield build
    for each in made:
        each.close()


def finish(supervisor: Supervisor) -> Outcome:
    end = time.monotonic() + PATIENCE
    while supervisor.poll():
        assert time.monotonic() < end, "the agents did not end"
        time.sleep(0.01)
    return supervisor.outcome


def wait_ready(tmp_path: Path, supervisor: Supervisor, *indices: int) -> None:
    """Until these agents have installed their handlers."""
    end = time.monotonic() + PATIENCE
    logs = [tmp_path / f"log-{index}" for index in indices]
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert supervisor.poll()
        assert time.monotonic() < end, "the agents did not start"
        time.sleep(0.01)


def starts(tmp_path: Path, index: int) -> int:
    return int((tmp_path / f"starts-{index}").read_text())


def test_a_job_is_done_when_every_agent_ends_with_zero(make: Callable[..., Supervisor]) -> None:
    supervisor = make(["0"], ["0"])
    supervisor.start()
    assert finish(supervisor) == Outcome("done", 0)


@pytest.mark.parametrize("end", ["128", "kill"])
def test_an_agent_that_may_try_again_is_started_again(
    make: Callable[..., Supervisor], tmp_path: Path, end: str
) -> None:
    supervisor = make([end, end, "0"])
    supervisor.start()
    assert finish(supervisor) == Outcome("done", 0)
    assert starts(tmp_path, 0) == 3


@pytest.mark.parametrize("code", [1, 127])
def test_a_code_below_128_fails_the_job_and_stops_the_other_agents(
    make: Callable[..., Supervisor], tmp_path: Path, code: int
) -> None:
    supervisor = make(["wait"], [str(code)])
    supervisor.start()
    assert finish(supervisor) == Outcome("failed", code, "node-1")
    assert starts(tmp_path, 1) == 1, "no second try"


def test_the_pause_before_a_restart_doubles_and_progress_sets_it_back(
    make: Callable[..., Supervisor], reported: Told
) -> None:
    supervisor = make(["201"], max_restarts=3)
    supervisor.start()
    finish(supervisor)
    assert [fields["seconds"] for _, event, fields in reported if event == "agent-restarting"] == [
        0.05,
        0.1,
        0.2,
    ]


def test_an_agent_that_only_dies_is_given_up_in_the_end(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    supervisor = make(["kill"], max_restarts=2)
    supervisor.start()
    assert finish(supervisor) == Outcome("failed", -9, "node-0")
    assert starts(tmp_path, 0) == 3


def test_progress_refills_the_patience_with_an_agent(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    supervisor = make(["201", "201", "201", "0"], max_restarts=1)
    supervisor.start()
    end = time.monotonic() + PATIENCE
    while supervisor.poll():
        assert time.monotonic() < end
        supervisor.record_progress()
        time.sleep(0.01)
    assert supervisor.outcome == Outcome("done", 0)
    assert starts(tmp_path, 0) == 4


def test_a_stop_asks_every_agent_to_save_and_none_is_started_again(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    supervisor = make(["wait"], ["wait"])
    supervisor.start()
    wait_ready(tmp_path, supervisor, 0, 1)
    supervisor.stop()
    assert finish(supervisor) == Outcome("stopped", 200, "node-1")
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (1, 1)


def test_a_second_request_ends_agents_that_do_not_listen(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    supervisor = make(["deaf"], ["wait"])
    supervisor.start()
    wait_ready(tmp_path, supervisor, 0, 1)
    supervisor.stop()
    assert supervisor.poll(), "the deaf agent is still there"
    supervisor.kill()
    assert finish(supervisor).kind == "killed"


def test_an_agent_that_does_not_stop_within_the_grace_is_killed(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    supervisor = make(["deaf"], grace_seconds=0.3)
    supervisor.start()
    wait_ready(tmp_path, supervisor, 0)
    supervisor.stop()
    assert finish(supervisor) == Outcome("killed", -9, "node-0")


def test_a_stop_while_an_agent_waits_for_its_restart_ends_the_job(
    make: Callable[..., Supervisor], reported: Told
) -> None:
    supervisor = make(["201"], max_restarts=99)
    supervisor.start()
    end = time.monotonic() + PATIENCE
    while not any(event == "agent-restarting" for _, event, _ in reported):
        assert supervisor.poll()
        assert time.monotonic() < end
        time.sleep(0.01)
    supervisor.stop()
    assert finish(supervisor).kind == "stopped"


def test_a_failure_while_stopping_is_still_a_failure(
    make: Callable[..., Supervisor], tmp_path: Path
) -> None:
    supervisor = make(["wait"], ["wait70"])
    supervisor.start()
    wait_ready(tmp_path, supervisor, 0, 1)
    supervisor.stop()
    assert finish(supervisor) == Outcome("failed", 70, "node-1")


def test_agents_live_in_sessions_of_their_own_so_ctrl_c_reaches_kdist_alone(
    make: Callable[..., Supervisor], tmp_path: Path, reported: Told
) -> None:
    supervisor = make(["wait"], ["wait"])
    supervisor.start()
    pids = [int(fields["pid"]) for _, event, fields in reported if event == "agent-started"]
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
    reported: Told = []
    environment = {**os.environ, "KDIST_SCRATCH": str(tmp_path / "node-0")}
    command = AgentCommand(
        "node-0", [sys.executable, "-c", DAEMON], environment, tmp_path, tmp_path / "log"
    )

    def tell(node: str, event: str, /, **fields: object) -> None:
        reported.append((node, event, fields))

    supervisor = Supervisor([command], grace_seconds=20, max_restarts=0, on_event=tell)
    supervisor.start()
    assert finish(supervisor) == Outcome("failed", -9, "node-0")
    daemon = Path("/proc", (tmp_path / "daemon").read_text())
    assert not daemon.exists() or " Z " in (daemon / "stat").read_text(), (
        "gone when its agent's end is told"
    )


@pytest.mark.parametrize(("seconds", "interrupts"), [(PATIENCE, False), (0.0, True)])
def test_a_ctrl_c_pressed_again_just_when_the_run_has_stopped_is_ignored_and_a_later_one_is_not(
    seconds: float, interrupts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_LATE_CTRL_C_SECONDS", seconds)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SignalQueue() as signals:
            signal.raise_signal(signal.SIGINT)
        assert signals.received.pop() is signal.SIGINT
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("seconds", "count"), [(PATIENCE, 1), (0.0, 2)])
def test_signals_that_come_together_are_one_request(
    number: signal.Signals, seconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SAME_CTRL_C_SECONDS", "SAME_REQUEST_SECONDS"):
        monkeypatch.setattr(supervisor_module, name, seconds)
    before = signal.getsignal(signal.SIGINT)
    with SignalQueue() as signals:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert signals.received == [number] * count
        assert [kills for _, kills in signals.take()] == [False, True][:count]
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_after_a_run_that_nobody_stopped_interrupts() -> None:
    with SignalQueue() as signals:
        signals.wait(0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

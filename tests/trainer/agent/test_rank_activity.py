"""What ranks do, as their agent sees it: since when they wait, and the line at which they stand."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.agent import hangs
from kdist_trainer.agent.hangs import RankActivity
from kdist_trainer.instrumentation.fault_handler import LOOK
from kdist_trainer.processes.liveness import Heartbeat, heartbeat_path
from kdist_trainer.processes.process_tree import age_seconds, catches
from tests.house.tree import ROOT

STANDS = """
import sys, time
from pathlib import Path
if sys.argv[2] == "registers":
    from kdist_trainer.instrumentation.fault_handler import install
    install(Path(sys.argv[1]), 0)
print("ready", flush=True)
time.sleep(100_000)  # line 8
"""
LINE = "stands.py:8 in <module>"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for lines after a moment."""
    monkeypatch.setattr(hangs, "LOOK_SECONDS", 0.1)


@pytest.fixture(name="start")
def make_start(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> int:
        script = tmp_path / "stands.py"
        script.write_text(STANDS)
        command = [sys.executable, str(script), str(tmp_path), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def follow(activity: RankActivity, heartbeat: Heartbeat, *, until: str, seconds: float = 20) -> Any:
    """Observe as the agent's loop does, until an entry has the field; the entry."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        activity.observe([heartbeat.read()], living=[0])
        entry = activity.entries()[0]
        if entry[until] is not None:
            return entry
        time.sleep(0.05)
    return activity.entries()[0]


def test_of_a_rank_that_nothing_is_seen_of_the_line_is_known_and_it_goes_on(
    tmp_path: Path, start: Any
) -> None:
    pid = start("registers")
    heartbeat = Heartbeat.create(heartbeat_path(tmp_path, 0))
    activity = RankActivity(tmp_path, {0: pid})
    entry = follow(activity, heartbeat, until="line")
    assert entry["line"] == LINE
    assert (entry["quiet_seconds"], entry["collective_seconds"], entry["ended"]) == (
        None,
        None,
        False,
    )
    assert Path(f"/proc/{pid}").exists()
    heartbeat.enter("all_reduce", 1, "float32")
    activity.observe([heartbeat.read()], living=[0])
    entry = activity.entries()[0]
    assert (entry["line"], entry["quiet_seconds"]) == (None, 0.0)
    assert entry["collective_seconds"] == 0.0
    heartbeat.leave()
    activity.observe([heartbeat.read()], living=[])
    assert (activity.entries()[0]["collective_seconds"], activity.entries()[0]["ended"]) == (
        None,
        True,
    )


def test_a_process_without_a_handler_is_never_signalled(tmp_path: Path, start: Any) -> None:
    pid = start("does not")
    assert LOOK is not None
    assert not catches(pid, LOOK)
    assert catches(pid, signal.SIGINT)
    heartbeat = Heartbeat.create(heartbeat_path(tmp_path, 0))
    entry = follow(RankActivity(tmp_path, {0: pid}), heartbeat, until="line", seconds=1.0)
    assert entry["line"] is None
    assert Path(f"/proc/{pid}/status").read_text().count("State:\tS") == 1


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = (
        "import time; time.sleep(0.5); "
        "from kdist_trainer.processes.process_tree import age_seconds; print(age_seconds())"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(found.stdout) >= 0.5
    assert age_seconds() > 0

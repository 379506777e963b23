"""A script that is killed faster than it can start: `kdist why` says so with both times, and the
run ends by its limit of restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from kdist.errors import Code
from tests.cli.running import Run, Start, write_script

SLOW = """
import time

time.sleep(100_000)  # it reads its data
"""
SAID = (
    r"starting takes longer than the time between losses: the last (\d+) worker groups were lost "
    r"\d+\.\d s apart, before their first step, and a start takes more than \d+\.\d s"
)


def started(folder: Path) -> list[int]:
    """The processes that have run the script, in order."""
    lines = [line for log in folder.glob("node-*/log") for line in log.read_text().splitlines()]
    return [json.loads(line)["pid"] for line in lines if '"event":"worker-started"' in line]


def lose(run: Run, killed: list[int], *, times: int) -> None:
    """Kill each process of the script once it was started."""
    for _ in range(times):
        wait_for_start(run, len(killed) + 1)
        killed.append(started(run.folder("slow"))[len(killed)])
        with contextlib.suppress(ProcessLookupError):
            os.kill(killed[-1], signal.SIGKILL)


def wait_for_start(run: Run, times: int) -> None:
    folder = run.folder("slow")
    run.wait_until(lambda: len(started(folder)) >= times, f"start {times}")


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.sampled
def test_a_run_that_is_killed_faster_than_it_can_start_says_so_and_ends_by_its_restarts(
    start: Start, tmp_path: Path
) -> None:
    path = write_script(tmp_path, SLOW, "slow.py")
    run = start("--set", "spec.maxRestarts=3", path)
    killed: list[int] = []
    lose(run, killed, times=3)
    wait_for_start(run, 4)
    said = " ".join(run.ask("why", "slow").split())
    assert re.search(SAID, said), said
    assert "the last 3 worker groups" in said
    assert "no restart is left" in said
    assert "script.preload: torch" in said
    lose(run, killed, times=1)
    run.wait(Code.JOB_FAILED)
    assert "restart limit reached: 3 restarts without progress" in run.errors()
    assert re.search(SAID, " ".join(run.errors().split()))
    ended = json.loads(run.ask("why", "slow", "-o", "json"))
    assert (ended["cause"], ended["severity"]) == ("slow-start", "failed")
    assert "the last 4 worker groups" in ended["sentence"]
    assert len(started(run.folder("slow"))) == 4

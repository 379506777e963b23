"""The process of a tracker: one at a time, begun again if it dies, and no end waits long for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.agent import tracker_process
from kdist_trainer.agent.launch import end
from kdist_trainer.agent.tracker_process import TrackerProcess
from kdist_trainer.checkpoint.ledger import RunLedger
from kdist_trainer.config import Exit, TrainConfig
from kdist_trainer.processes.signals import StopSignals
from tests.patience import soon
from tests.trainer.agent.test_settings import make_settings

Start = Callable[[str], tuple[TrackerProcess, list[str]]]
WAITS = "import sys\nsys.stdin.read()"
HANGS = "import time\ntime.sleep(60)"


@pytest.fixture
def begun() -> list[subprocess.Popen[bytes]]:
    return []


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[subprocess.Popen[bytes]]
) -> Iterator[Start]:
    """Start a tracker whose process has this code; returns it and what it has shown."""
    real, trackers = subprocess.Popen, list[TrackerProcess]()

    def make(code: str) -> tuple[TrackerProcess, list[str]]:
        def popen(_command: object, **named: Any) -> subprocess.Popen[bytes]:
            begun.append(real([sys.executable, "-c", code], **named))
            return begun[-1]

        monkeypatch.setattr(subprocess, "Popen", popen)
        monkeypatch.setattr(tracker_process, "find_spec", lambda _: True)
        train = {"workload": "digits", "steps": 1, "tracker": "mlflow"}
        document = {"name": "job", "nodes": {"min": 1, "max": 1}, "train": train}
        settings = replace(
            make_settings(tmp_path),
            config=TrainConfig.model_validate(document),
            checkpoints=tmp_path,
        )
        shown = list[str]()
        trackers.append(TrackerProcess(settings, shown.append))
        trackers[-1].begin_group(is_group_rank_0=True)
        return trackers[-1], shown

    yield make
    for each in trackers:
        each.kill()


def test_only_an_address_is_shown_and_no_password(
    start: Start, begun: list[subprocess.Popen[bytes]]
) -> None:
    code = (
        "import os\nprint('View run at http://b')\nprint('https://me:p@ss/w@host:5/#/runs/1')\n"
        "print('http' + os.environ['MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT'], flush=True)"
    )
    _, shown = start(code)
    begun[0].wait()
    assert soon(lambda: len(shown) == 2, seconds=10)
    assert shown == ["https://host:5/#/runs/1", "httptrue"]


def test_one_that_has_died_is_said_and_started_again_after_a_while(
    start: Start,
    begun: list[subprocess.Popen[bytes]],
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker, _ = start(WAITS)
    tracker.tend()
    assert len(begun) == 1
    os.kill(begun[0].pid, signal.SIGKILL)
    begun[0].wait()
    for _ in range(3):
        tracker.tend()
    assert len(begun) == 1
    assert ["tracker-failed" in line for line in logged] == [True]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 121)
    tracker.tend()
    assert len(begun) == 2


def test_another_node_writes_alone(start: Start, begun: list[subprocess.Popen[bytes]]) -> None:
    tracker, _ = start(WAITS)
    tracker.begin_group(is_group_rank_0=False)
    tracker.tend()
    assert begun[0].wait() == -signal.SIGKILL
    assert len(begun) == 1


def test_the_end_waits_for_the_rest_and_says_what_it_did_not_wait_for(
    start: Start, logged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, _ = start(WAITS)
    tracker.end(StopSignals())
    assert logged == []
    monkeypatch.setattr(tracker_process, "_END_SECONDS", 0.5)
    tracker, _ = start(HANGS)
    ledger = RunLedger(tmp_path)
    assert ledger.events() == []
    tracker.end(StopSignals())
    assert ["tracker-failed" in line for line in logged] == [True]
    assert [event["event"] for event in ledger.events()] == ["tracker-behind"]


def test_a_second_request_to_stop_ends_the_wait(start: Start) -> None:
    class Stop(StopSignals):
        looked = 0

        @property
        def urgent(self) -> bool:
            self.looked += 1
            return self.looked > 3

        @urgent.setter
        def urgent(self, _value: bool) -> None:
            pass

    tracker, _ = start(HANGS)
    stop = Stop()
    tracker.end(stop)
    assert stop.looked == 4, "the wait ends at the first look that finds it"


@pytest.mark.parametrize("code", [Exit.STOPPED, Exit.DONE])
def test_the_exit_record_is_written_before_the_wait_which_only_a_last_end_has(
    tmp_path: Path, code: Exit
) -> None:
    settings, called = make_settings(tmp_path), list[tuple[str, bool]]()
    settings.scratch.mkdir(parents=True)

    class Tracker:
        def end(self, _stop: StopSignals) -> None:
            called.append(("end", any(settings.scratch.glob("exit*"))))

        def kill(self) -> None:
            called.append(("kill", any(settings.scratch.glob("exit*"))))

    tracker: Any = Tracker()
    end(settings, {"code": int(code)}, stop=StopSignals(), tracker=tracker)
    assert called == [("kill" if code.retryable else "end", True)]

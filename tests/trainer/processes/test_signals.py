"""What a second signal means, and which processes go on at SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdist_trainer.formats import SAME_REQUEST_SECONDS
from kdist_trainer.processes.signals import StopCounter

SERVER = """
import os
import signal

from kdist_trainer.processes.signals import leave_stops_to_others

leave_stops_to_others()
os.kill(os.getpid(), signal.SIGTERM)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


ALONE = """
import os, signal, time
from kdist_trainer.processes import signals
from kdist_trainer.script.stop import stop_requested

stop_requested()
os.kill(os.getpid(), signal.SIGTERM)
assert stop_requested() is None, "the agent may still say what it is for"
signals.SAME_REQUEST_SECONDS = 0.1
time.sleep(0.2)
stop_requested()
"""


def test_a_sigterm_of_which_the_agent_says_nothing_ends_a_script_as_ever(tmp_path: Path) -> None:
    environment = {**os.environ, "KDIST_SCRATCH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", ALONE], env=environment, timeout=60)
    assert ended.returncode == -signal.SIGTERM


def test_signals_that_come_together_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kdist_trainer.processes.signals.time.monotonic", lambda: now)
    requests = StopCounter()
    assert not requests.add()
    now += SAME_REQUEST_SECONDS
    assert not requests.add()
    now += 0.1
    assert requests.add()
    assert requests.first_at == 100.0


def test_a_server_of_forks_goes_on_at_sigterm_and_its_forks_do_not() -> None:
    ended = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "-15\n"), ended.stderr

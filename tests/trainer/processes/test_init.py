"""Process 1 of a pod without an init: signals reach the agent, its exit code is the pod's, and
nothing is left behind as a zombie.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kdist_trainer.processes import init

pytestmark = pytest.mark.processes


def start(folder: Path, agent: str) -> subprocess.Popen[str]:
    """Process 1 above an agent that is this program."""
    package = folder / "kdist_trainer"
    (package / "processes").mkdir(parents=True)
    for file in ("__init__.py", "processes/__init__.py"):
        (package / file).touch()
    (package / "__main__.py").write_text(agent)
    shutil.copy(init.__file__, package / "processes" / "init.py")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kdist_trainer.processes.init", "--node=a"],
        env={"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(73)", 73), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("pass", 0)],
)
def test_the_end_of_the_agent_is_the_end_of_the_pod(tmp_path: Path, end: str, code: int) -> None:
    program = f"import os, signal, sys\nassert sys.argv[1:] == ['--node=a']\n{end}\n"
    assert start(tmp_path, program).wait(60) == code


def test_a_signal_is_passed_on_also_to_an_agent_that_has_just_been_started(tmp_path: Path) -> None:
    agent = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(200))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = start(tmp_path, agent)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 200

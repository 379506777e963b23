"""`kdist wait` for a run on this machine: it returns when the condition is met, and not at the end
of the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.job.local.job import LocalJob
from kdist.job.local.status import read_status
from tests.cli.running import PATIENCE, Start, write_script

SCRIPT = """
import time
from pathlib import Path

import torch
from kdist_trainer import Checkpointer, Reporter

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with {reporter}Checkpointer(model=model, optimizer=optimizer, every_steps=5) as checkpointer:
    step = 0
    while not Path("end").exists():
        step += 1
        {step}
        checkpointer.maybe_save(step)
        time.sleep(0.01)
"""


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(
    ("reporter", "step", "goals"),
    [
        ("Reporter() as reporter, ", "reporter.step(loss=1.0)", ("first-step", "checkpoint")),
        ("", "", ("checkpoint",)),
    ],
    ids=["with a reporter", "without one"],
)
def test_a_script_that_saves_is_waited_for_no_longer_than_until_its_step_and_its_checkpoint(
    start: Start, tmp_path: Path, reporter: str, step: str, goals: tuple[str, ...]
) -> None:
    script = SCRIPT.format(reporter=reporter, step=step or "pass")
    run = start(write_script(tmp_path, script, "train.py"))
    run.wait_until((run.folder("train") / "run.json").exists, "run folder")
    for goal in goals:
        waited = subprocess.run(
            [sys.executable, "-m", "kdist", "wait", "train", "--local", "--for", goal],
            cwd=tmp_path,
            env={**os.environ, "KDIST_HOME": str(tmp_path / "runs")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert waited.returncode == 0, waited.stderr
        assert run.process.poll() is None, run.errors()
    (tmp_path / "end").touch()
    run.wait(0)


def test_a_run_whose_agents_have_all_ended_is_finishing_and_not_starting(tmp_path: Path) -> None:
    (tmp_path / "node-0").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "1", "invocations": [{}]}))
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its `kdist run` does
        assert read_status(LocalJob(tmp_path)).reason == "Loading"
        (tmp_path / "node-0" / "exit.json").write_text("{}")
        status = read_status(LocalJob(tmp_path))
    assert (status.phase, status.reason) == ("Running", "Finishing")

"""The example scripts: the same weights under torchrun and under kdist, also when a rank is killed
on the way.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.faults.training_run import TrainingRun, kill
from tests.house.tree import ROOT

# The promise itself is held by tests/trainer/agent/test_scripts.py, with a script that takes
# seconds.
pytestmark = [pytest.mark.processes, pytest.mark.chaos, pytest.mark.timeout(600)]

FOLDER = ROOT / "examples" / "script"
EPOCHS = 5


@pytest.fixture(scope="module")
def by_torchrun() -> list[str]:
    """The digest of the weights that two ranks of the plain script have under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    script = [str(FOLDER / "ddp.py"), "--epochs", str(EPOCHS)]
    done = subprocess.run(
        [*command, *script], check=True, capture_output=True, text=True, timeout=200
    )
    return read_weights(done.stdout)


def read_weights(output: str) -> list[str]:
    return re.findall(r"weights ([0-9a-f]{64})$", output, re.MULTILINE)


@pytest.mark.sampled
def test_a_script_with_a_checkpointer_has_them_too_when_a_rank_is_killed_on_the_way(
    by_torchrun: list[str], tmp_path: Path
) -> None:
    job = yaml.safe_load((FOLDER / "job.yaml").read_text())
    job["spec"]["code"] = str(FOLDER)
    job["spec"]["script"]["args"] = ["--epochs", str(EPOCHS)]
    with TrainingRun(tmp_path, job) as run:
        run.wait_until(lambda: len(run.events("commit")) >= 1, "the first checkpoint", every=0.002)
        kill(run.ranks()[-1].pid)
        assert run.wait() == 0, run.output()
    generations = run.events("generation")
    assert [event["reason"] for event in generations] == ["start", "failure"]
    assert generations[-1]["from_step"] >= 20
    assert run.done()["weights"] == by_torchrun[0]


@pytest.mark.sampled
def test_a_script_that_starts_its_own_processes_trains_alone_and_as_a_job_of_two_nodes(
    tmp_path: Path,
) -> None:
    classic = [str(FOLDER / "classic.py"), "--epochs", "2"]
    alone = subprocess.run(
        [sys.executable, *classic, "--nodes", "1", "--gpus", "2", "--nr", "0"],
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "kdist",
            "run",
            "--nodes",
            "2",
            *classic,
            "--nodes",
            "2",
            "--gpus",
            "1",
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    reported = [
        re.findall(r"epoch \d of 2: loss [0-9.]+", run.stdout + run.stderr) for run in (alone, job)
    ]
    assert len(reported[0]) == 2
    assert reported[1] == reported[0], "the same two processes, wherever they were started"

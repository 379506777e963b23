"""The disk of the checkpoints is full for a while: the training goes on, and what was committed
stays as it was.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_disk import fill, small_disk

from .check_ledger import assert_every_sample_once
from .training_run import TrainingRun, describe_job

EPOCHS, SAMPLES = 12, 1437
STEPS_ON = 25  # with a disk that is full


@pytest.fixture(name="disk")
def make_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", mib=12)


def scrape(run: TrainingRun, name: str) -> float:
    """Sum of a metric's samples whose line begins with `name`, over all agents."""
    total = 0.0
    for note in run.folder.glob("node-*/agent.json"):
        port = json.loads(note.read_text())["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        total += sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
    return total


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_full_disk_costs_checkpoints_and_nothing_else(disk: Path, tmp_path: Path) -> None:
    train = {
        "workload": "digits",
        "epochs": EPOCHS,
        "globalBatch": 64,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 10}, "keep": 1},
    }
    job = describe_job(
        "full",
        nodes=1,
        procsPerNode=2,
        train=train,
        checkpoints={"path": str(disk / "checkpoints")},
    )
    with TrainingRun(tmp_path / "run", job) as run:
        run.checkpoints = disk / "checkpoints"
        run.wait_until(lambda: len(run.events("commit")) >= 2, "two checkpoints")
        ballast = fill(disk)
        failed = run.wait_until(
            lambda: [e for e in run.log("node-0") if e["event"] == "checkpoint-failed"],
            "a save to fail",
        )
        assert failed[0]["cause"] == "enospc"
        committed = run.events("commit")[-1]["step"]
        newest = (run.checkpoints / "LATEST").read_text()
        beyond = failed[0]["step"] + STEPS_ON
        run.wait_until(
            lambda: any(rank.beat.step > beyond for rank in run.ranks()), "steps on a full disk"
        )
        assert scrape(run, "kdist_checkpoint_failures_total") >= 1
        assert run.events("commit")[-1]["step"] == committed
        assert (run.checkpoints / "LATEST").read_text() == newest
        ballast.unlink()
        run.wait_until(
            lambda: run.events("commit")[-1]["step"] > committed, "a checkpoint once there is room"
        )
        assert run.wait() == 0, run.output()
        assert len(run.events("generation")) == 1
        assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)

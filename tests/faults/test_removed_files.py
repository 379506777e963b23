"""Files of a run on this machine are removed while it trains: what was read is kept, and what is
lost is named.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .training_run import TrainingRun, describe_job, kill

pytestmark = [
    pytest.mark.processes,
    pytest.mark.chaos,
    pytest.mark.sampled,
    pytest.mark.timeout(400),
]


def make_run(home: Path, *, steps: int) -> TrainingRun:
    train = {
        "workload": "digits",
        "steps": steps,
        "globalBatch": 64,
        "checkpoint": {"every": {"steps": 20}},
    }
    return TrainingRun(home, describe_job("removed", nodes=2, train=train))


def test_without_its_train_json_a_job_outlives_the_loss_of_a_rank_and_of_an_agent(
    tmp_path: Path,
) -> None:
    with make_run(tmp_path, steps=400) as run:
        run.wait_until(lambda: run.events("commit"), "a checkpoint")
        (run.folder / "train.json").unlink()
        kill(run.ranks()[-1].pid)
        run.wait_until(lambda: len(run.events("first_step")) == 2, "the second group")
        kill(run.agents()["node-1"])
        assert run.wait() == 0, run.output()
    assert len(run.events("generation")) == 3
    assert [one["event"] for one in run.log("node-1")].count("config-kept") == 1


def test_a_run_whose_folder_is_removed_ends_with_the_folder_and_no_number(tmp_path: Path) -> None:
    with make_run(tmp_path, steps=100_000) as run:
        run.wait_until(lambda: run.events("commit"), "a checkpoint")
        processes = run.processes()
        run.folder.rename(tmp_path / "away")  # at once: a save may make folders meanwhile
        shutil.rmtree(tmp_path / "away", ignore_errors=True)
        assert run.wait() == 10, run.output()
        assert f"the run folder {run.folder} was removed while the job ran" in run.output()
        assert "its checkpoints were in it" in run.output()
        assert not processes & run.processes(), "nothing trains on"

"""A training that loses a rank more often than it saves is saved all the same: the clock of the
saves goes on over the losses.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .training_run import TrainingRun, describe_job, kill

CODE = Path(__file__).parent / "code"
EVERY_SECONDS = 4
TRAINED_SECONDS = 1.0
"""Of a worker group, before it loses a rank."""
MOST_GROUPS = 12
SINGLE_STEP_SECONDS = 0.8
"""Long enough for a kill to come before the next step is done."""


def describe(name: str, workload: str, options: dict[str, Any], **train: Any) -> dict[str, Any]:
    """A job of two ranks that is to be saved every second."""
    train |= {"workload": workload, "options": options, "steps": 1_000_000, "globalBatch": 24}
    train |= {"checkpoint": {"every": {"seconds": 1}}}
    group: dict[str, Any] = {"nodes": 1, "procsPerNode": 2, "code": str(CODE)}
    return describe_job(name, maxRestarts=100, train=train, **group)


def has_trained(run: TrainingRun, generation: int) -> bool:
    """Whether this worker group has trained long enough, or has saved."""
    seconds = sum(line["seconds"] for line in run.steps() if line["generation"] == generation)
    return seconds >= TRAINED_SECONDS or bool(run.events("commit"))


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("recovery", ["inPlace", "restart"])
def test_a_training_that_is_disturbed_before_each_save_is_saved(
    recovery: str, tmp_path: Path
) -> None:
    train = {
        "workload": "digits",
        "steps": 1_000_000,
        "globalBatch": 64,
        "recovery": recovery,
        "checkpoint": {"every": {"seconds": EVERY_SECONDS}},
    }
    job = describe_job("disturbed", nodes=1, procsPerNode=2, maxRestarts=100, train=train)
    with TrainingRun(tmp_path, job) as run:
        for generation in range(1, MOST_GROUPS):
            run.wait_until(partial(has_trained, run, generation), f"training of {generation}")
            if run.events("commit"):
                break
            kill(run.ranks()[-1].pid)
        commit = run.events("commit")[0]
        assert generation > 2, "the interval is longer than what a group trains"
        assert commit["step"] > 0


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_takes_longer_than_two_losses_are_apart_is_committed(
    victim: int, tmp_path: Path
) -> None:
    losses = tmp_path / "losses"
    losses.mkdir()
    job = describe("held", "held:Held", {"losses": str(losses)}, syncEverySteps=5)
    with TrainingRun(tmp_path, job) as run:
        for generation in range(1, MOST_GROUPS):
            run.wait_until(partial(has_trained, run, generation), f"training of {generation}")
            if run.events("commit"):
                break
            kill(run.ranks()[victim].pid)
            (losses / str(generation)).touch()
        commit = run.events("commit")[0]
        assert all("kept_step" in one for one in run.events("generation")[1:])
        steps = [line["step"] for line in run.steps()]
        assert steps == list(range(1, steps[-1] + 1)), "nothing is lost meanwhile"
        run.wait_until(lambda: len(run.ranks()) == 2, "a whole group")
        for rank in run.ranks():
            kill(rank.pid)
        run.wait_until(lambda: went_back(run, commit["step"]), "training from the checkpoint")


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
def test_a_training_that_loses_a_rank_after_each_single_step_is_saved(tmp_path: Path) -> None:
    options = {"period": 10**9, "pause": SINGLE_STEP_SECONDS}
    job = describe("single", "counting:Counting", options)
    with TrainingRun(tmp_path, job) as run:
        for generation in range(1, MOST_GROUPS):
            run.wait_until(partial(has_finished_a_step, run, generation), f"step of {generation}")
            if commits := run.events("commit"):
                break
            kill(run.ranks()[1].pid)
        assert commits, "no group has come to agree on a save"
        steps = [line["step"] for line in run.steps()]
        assert steps == list(range(1, steps[-1] + 1)), "nothing is lost meanwhile"


def has_finished_a_step(run: TrainingRun, generation: int) -> bool:
    """Whether this worker group has finished a step, or has saved."""
    starts = [one for one in run.events("first_step") if one["generation"] == generation]
    return bool(starts) or bool(run.events("commit"))


def went_back(run: TrainingRun, step: int) -> bool:
    """Whether the newest group has begun at this step, and trains."""
    newest = run.events("generation")[-1]
    lines = [one["step"] for one in run.steps() if one["generation"] == newest["generation"]]
    return "kept_step" not in newest and newest["from_step"] == step and step + 1 in lines

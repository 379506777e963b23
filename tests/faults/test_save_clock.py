"""A training that loses a rank more often than it saves is saved all the same: the clock of the
saves goes on over the losses.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from .training_run import TrainingRun, describe_job, kill

EVERY_SECONDS = 4
TRAINED_SECONDS = 1.0
"""Of a worker group, before it loses a rank."""
MOST_GROUPS = 12


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

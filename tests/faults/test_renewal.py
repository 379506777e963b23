"""A rank that has left too many groups in which collectives still wait gets a new process, which
takes over from another rank: nobody else is replaced, and no step is lost.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kdist_trainer.distributed.left_groups import MOST_WAITED_IN
from tests.process_usage import count

from .test_in_place import assert_nothing_was_repeated, wait_for_generation
from .training_run import TrainingRun, describe_job, kill

LOSSES = 3
GROUPS = MOST_WAITED_IN // LOSSES + 1
"""Of each worker group: not one too many after all but the last of the losses."""


def pids(run: TrainingRun) -> dict[str, int]:
    return {rank.node: rank.pid for rank in run.ranks()}


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.sampled
def test_a_rank_that_keeps_too_many_groups_gets_a_new_process_and_no_step_is_lost(
    tmp_path: Path,
) -> None:
    train = {
        "workload": "crowded:Crowded",
        "options": {"groups": GROUPS},
        "steps": 1_000_000,
        "globalBatch": 64,
        "syncEverySteps": 5,
    }
    code = str(Path(__file__).parent / "code")
    job = describe_job("crowded", nodes=2, code=code, train=train, collectiveTimeoutSeconds=600)
    with TrainingRun(tmp_path, job) as run:
        wait_for_generation(run, 1, world_size=2)
        crowded = pids(run)["node-0"]
        for generation in range(1, LOSSES + 1):
            assert pids(run)["node-0"] == crowded, "it keeps no more groups than it may"
            kill(pids(run)["node-1"])
            wait_for_generation(run, generation + 1, world_size=2)
        before = count(crowded), pids(run)
        wait_for_generation(run, LOSSES + 2, world_size=2)
        after = pids(run)
        assert before[1] == {"node-0": crowded, "node-1": after["node-1"]}, "only one is replaced"
        assert after["node-0"] != crowded
        few = count(after["node-0"])
        assert few.threads <= before[0].threads - 2 * MOST_WAITED_IN
        assert few.descriptors <= before[0].descriptors - 3 * MOST_WAITED_IN
        last = run.steps()[-1]["step"]
        run.wait_until(lambda: run.steps()[-1]["step"] > last + 50, "more steps")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    reasons = [event["reason"] for event in run.events("generation")]
    assert reasons == ["start", *["failure"] * LOSSES, "renew"]
    assert [event["pid"] for event in run.log("node-0") if event["event"] == "rank-renewed"] == [
        crowded
    ]
    assert run.report()["restarts"]["total"] == LOSSES, "it is no failure"
    assert_nothing_was_repeated(run)

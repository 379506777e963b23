"""A process that pauses, such as one of a busy machine, is not taken for a lost node."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from kdist_trainer.rendezvous.membership import SILENCE_SECONDS

from .test_in_place import describe, wait_for_step
from .training_run import TrainingRun

PAUSES = int(os.environ.get("KDIST_PAUSES", "8"))


@pytest.mark.sampled
@pytest.mark.processes
def test_pauses_shorter_than_the_bound_end_no_generation(tmp_path: Path) -> None:
    """Of agents, of ranks and of whole nodes, drawn."""
    draw = random.Random(0)
    job = describe("paused", nodes={"min": 1, "max": 2}, procsPerNode=1)
    job["spec"]["train"]["epochs"] = 100_000
    with TrainingRun(tmp_path, job) as run:
        pids = {rank.node: rank.pid for rank in wait_for_step(run, 10)}
        agents = run.agents()
        for _ in range(PAUSES):
            node = draw.choice(sorted(pids))
            paused = draw.choice([[agents[node]], [pids[node]], [agents[node], pids[node]]])
            for pid in paused:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0, 0.9 * SILENCE_SECONDS))  # the length of the pause
            for pid in paused:
                os.kill(pid, signal.SIGCONT)
        step = run.steps()[-1]["step"]
        wait_for_step(run, step + 10)
        assert {line["generation"] for line in run.steps()} == {1}
        assert {rank.node: rank.pid for rank in run.ranks()} == pids
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()


@pytest.mark.sampled
@pytest.mark.processes
def test_a_job_that_cannot_do_without_a_silent_node_waits_for_it(tmp_path: Path) -> None:
    job = describe("awaited", nodes=2, procsPerNode=1)
    job["spec"]["train"]["epochs"] = 100_000
    with TrainingRun(tmp_path, job) as run:
        pids = {rank.node: rank.pid for rank in wait_for_step(run, 10)}
        paused = [run.agents()["node-1"], pids["node-1"]]
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * SILENCE_SECONDS)  # the length of the pause
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
        wait_for_step(run, run.steps()[-1]["step"] + 10)
        assert {line["generation"] for line in run.steps()} == {1}
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()

"""A training that loses a rank a second keeps nothing of it: after many losses its survivor and its
agent hold as many descriptors, threads and files as after a few, but for the groups that are still
waited in, and gloo takes no more of the processor.

KDIST_SOAK_LOSSES says how many ranks are lost (60).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.soak.disturbance import Disturbance
from bench.soak.scenarios import Accident, Scenario
from kdist_trainer.distributed.left_groups import MOST_WAITED_IN
from tests.process_usage import ThreadTimes, Usage, count

from .training_run import Rank, TrainingRun, describe_job

LOSSES = int(os.environ.get("KDIST_SOAK_LOSSES", "60"))
FEW = 3
PROCS = 2
PATIENCE_SECONDS = 30.0
OF_THE_MOMENT = 3
"""Descriptors and threads that come and go: of the ledger, which its first line opens, of requests,
and of a save in the background.
"""
THREADS_OF_A_GROUP, DESCRIPTORS_OF_A_GROUP = 3, 8
"""Of a group that is still waited in: what epoll needs, and the connections of its store."""
GLOO_SHARE = 0.1
"""The most of a core that all of gloo's threads may take beyond what they took at first."""
GLOO = ("gloo_tcp_loop", "pt_gloo_runloop")
ACCIDENTS = [Accident("rank", "node-1", 0), Accident("rank", "node-0", 1)]


class Totals(NamedTuple):
    """What a run holds."""

    rank: Usage
    agent: Usage
    processes: int
    files: int


def count_all(run: TrainingRun, survivor: int) -> Totals:
    """What the surviving rank, its agent and the run hold."""
    files = sum(1 for path in (run.folder / "node-0").rglob("*") if path.is_file())
    return Totals(count(survivor), count(run.agents()["node-0"]), len(run.processes()), files)


def is_no_more(after: Totals, before: Totals) -> bool:
    """Whether the run holds no more than before, but for what comes and goes, and for as many
    groups as may be waited in.
    """
    pairs = ((after.rank, before.rank, MOST_WAITED_IN), (after.agent, before.agent, 0))
    return (after.processes, after.files) == (before.processes, before.files) and all(
        now.descriptors <= then.descriptors + OF_THE_MOMENT + DESCRIPTORS_OF_A_GROUP * groups
        and now.threads <= then.threads + OF_THE_MOMENT + THREADS_OF_A_GROUP * groups
        and now.shared_memory <= then.shared_memory
        for now, then, groups in pairs
    )


def wait_for_steps(run: TrainingRun, procs: int = 2, after: int = 0) -> dict[int, Rank]:
    """The ranks of the first node by their numbers, once all train in the same group, later than
    step `after`.
    """

    def are_there() -> dict[int, Rank]:
        ranks = [rank for rank in run.ranks() if rank.node == "node-0"]
        beats = [rank.beat for rank in ranks]
        ready = (
            len(beats) == procs
            and all(beat.phase.name in ("STEP", "DATA") and beat.step > after for beat in beats)
            and len({beat.generation for beat in beats}) == 1
        )
        return {rank.number: rank for rank in ranks} if ready else {}

    found: dict[int, Rank] = run.wait_until(are_there, "all ranks to train", every=0.005)
    return found


def lose(run: TrainingRun, disturbance: Disturbance, times: int) -> list[float]:
    """Lose a rank so often, each time soon after the training has come back from the loss before:
    about once a second; returns the seconds of the recoveries.
    """
    recoveries: list[float] = []

    def is_over() -> bool:
        if len(recoveries) < times:
            disturbance.advance()
            recoveries.extend(disturbance.take()["recoveries"])
        return len(recoveries) >= times

    run.wait_until(is_over, f"{times} recoveries", seconds=max(180, 10 * times))
    return recoveries


def until_no_more(look: Callable[[], Totals], before: Totals) -> Totals:
    """What the run holds, once it is no more than before, or when that takes too long: the agent
    may just be starting a process, and a rank looks at its groups once a second.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_no_more(now := look(), before) and time.monotonic() < deadline:
        pass
    return now


def loop_share(run: TrainingRun, pids: list[int], steps: int = 200) -> float:
    """The share of a core that gloo's threads of these ranks take while the training goes on."""
    times = ThreadTimes()

    def busy() -> float:
        seconds = times.read(pids)
        return sum(seconds[name] for name in GLOO)

    before, began = busy(), time.monotonic()
    last = wait_for_steps(run, PROCS)[0].beat.step
    wait_for_steps(run, PROCS, after=last + steps)
    return (busy() - before) / (time.monotonic() - began)


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(max(600, 10 * LOSSES))
def test_a_rank_that_is_lost_each_second_leaves_nothing_that_is_held_or_spins(
    tmp_path: Path,
) -> None:
    train = {
        "workload": "varied:Varied",
        "options": {"pause": 0.005},
        "steps": 1_000_000,
        "globalBatch": 24,
        "syncEverySteps": 5,
        "clipGradNorm": 1.0,
        "emaDecay": 0.98,
        "checkpoint": {"every": {"steps": 20}},
    }
    code = str(Path(__file__).parent / "code")
    job = describe_job(
        "soak", nodes=2, procsPerNode=PROCS, maxRestarts=100_000, code=code, train=train
    )
    scenario = Scenario("soak", 2, PROCS, ACCIDENTS, pause=0.5)
    with TrainingRun(tmp_path, job) as run:
        survivor = wait_for_steps(run, PROCS)[0].pid
        disturbance = Disturbance(run, scenario, tmp_path / "hold")
        recoveries = lose(run, disturbance, FEW)
        wait_for_steps(run, PROCS)
        few, quiet = count_all(run, survivor), loop_share(run, [survivor])
        recoveries += lose(run, disturbance, LOSSES - FEW)
        wait_for_steps(run, PROCS)
        many = until_no_more(lambda: count_all(run, survivor), few)
        share = loop_share(run, [survivor])
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    sys.stdout.write(
        f"{LOSSES} losses, worst recovery {max(recoveries)} s; gloo {quiet:.3f} -> {share:.3f} of "
        f"a core; {few} -> {many}\n"
    )
    assert is_no_more(many, few), f"{many} after {few}"
    assert share <= quiet + GLOO_SHARE, f"{share} of a core after {quiet}"

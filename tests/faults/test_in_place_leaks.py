"""Leaving and joining groups costs a surviving rank and its agent nothing that they keep: after
many of them they have as many descriptors, threads and files as after a few, and gloo takes no more
CPU.

KDIST_REGROUPS says how many (30).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process_usage import ThreadTimes, Usage, count

from .training_run import Rank, TrainingRun, describe_job, kill

REGROUPS = int(os.environ.get("KDIST_REGROUPS", "30"))
FEW = 5
PROCS = 4
PATIENCE_SECONDS = 30.0
OF_THE_MOMENT = 3
"""Descriptors and threads that come and go: of the ledger, which its first line opens, of requests,
and of a save in the background.
"""
WAITED_IN = 16
"""How many groups may be kept since a collective waits in them, until its time-out."""
THREADS_OF_A_GROUP = 3
DESCRIPTORS_OF_A_GROUP = 8
"""Of such a group: what epoll needs, and the connections of its store."""
GLOO_SHARE = 0.1
"""The most of a core that all of gloo's loops may take beyond what they took at first."""
LOOP = "gloo_tcp_loop"


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


def is_no_more(after: Totals, before: Totals, *, waited_in: int = 0) -> bool:
    """Whether the run holds no more than before, but for what comes and goes, and for so many
    groups in which a collective waits.
    """
    pairs = ((after.rank, before.rank, waited_in), (after.agent, before.agent, 0))
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


def regroup(run: TrainingRun, times: int, *, procs: int) -> None:
    """Lose the last rank so often, each time after progress, since equal failures are retried more
    and more slowly.
    """
    lost = wait_for_steps(run, procs)[procs - 1]
    for _ in range(times):
        kill(lost.pid)
        before, lost = lost, wait_for_steps(run, procs, after=lost.beat.step + 1)[procs - 1]
        assert lost.pid != before.pid


def wait_until_no_more(
    run: TrainingRun, survivor: int, before: Totals, *, waited_in: int = 0
) -> Totals:
    """What the run holds, once it is no more than before, or when that takes too long: the agent
    may just be starting a process, and a rank looks at its groups once a second.
    """
    now = count_all(run, survivor)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_no_more(now, before, waited_in=waited_in) and time.monotonic() < deadline:
        now = count_all(run, survivor)
    return now


def describe(name: str, procs: int) -> dict[str, object]:
    train = {
        "workload": "varied:Varied",
        "options": {"norms": True, "pause": 0.005},
        "steps": 1_000_000,
        "globalBatch": 24,
        "emaDecay": 0.9,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 20}},
    }
    code = str(Path(__file__).parent / "code")
    return describe_job(
        name, nodes=1, procsPerNode=procs, maxRestarts=100_000, code=code, train=train
    )


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(max(300, 3 * REGROUPS))
def test_many_groups_leave_no_more_behind_than_a_few(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, describe("leaks", 2)) as run:
        survivor = wait_for_steps(run, 2)[0].pid
        regroup(run, FEW, procs=2)
        few = count_all(run, survivor)
        regroup(run, REGROUPS - FEW, procs=2)
        many = wait_until_no_more(run, survivor, few)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert is_no_more(many, few), f"{many} after {few}"


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(max(600, 8 * REGROUPS))
def test_groups_of_many_ranks_that_were_left_take_no_cpu(tmp_path: Path) -> None:
    """With more ranks a message is often cut in the middle, which gloo would ask for for ever."""
    with TrainingRun(tmp_path, describe("spinning", PROCS)) as run:
        survivors = [wait_for_steps(run, PROCS)[number].pid for number in range(PROCS - 1)]
        regroup(run, 1, procs=PROCS)
        few, quiet = count_all(run, survivors[0]), loop_share(run, survivors)
        regroup(run, max(20, REGROUPS), procs=PROCS)
        many = wait_until_no_more(run, survivors[0], few, waited_in=WAITED_IN)
        share = loop_share(run, survivors)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert is_no_more(many, few, waited_in=WAITED_IN), f"{many} after {few}"
    assert share <= quiet + GLOO_SHARE, f"{share} of a core after {quiet}"


def loop_share(run: TrainingRun, pids: list[int], steps: int = 200) -> float:
    """The share of a core that gloo's loops of these ranks take while the training goes on."""
    times = ThreadTimes()
    before, began = times.read(pids)[LOOP], time.monotonic()
    last = wait_for_steps(run, PROCS)[0].beat.step
    wait_for_steps(run, PROCS, after=last + steps)
    return (times.read(pids)[LOOP] - before) / (time.monotonic() - began)

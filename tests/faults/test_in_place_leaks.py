"""Leaving and joining groups costs a surviving rank and its agent nothing that they keep: after
many of them they have as many descriptors, threads and files as after a few.

KDIST_REGROUPS says how many (30).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from .training_run import Rank, TrainingRun, describe_job, kill

REGROUPS = int(os.environ.get("KDIST_REGROUPS", "30"))
FEW = 5
KEEP_SECONDS = 0.5
"""How long a rank keeps a group that it has left, instead of the minutes that a collective may
still wait in it elsewhere.
"""


PATIENCE_SECONDS = 10.0
OF_THE_MOMENT = 3
"""Descriptors and threads that come and go: of the ledger, which its first line opens, of requests,
and of a save in the background.
"""


class Usage(NamedTuple):
    """What a rank or an agent holds."""

    descriptors: int
    threads: int
    shared_memory: int


class Totals(NamedTuple):
    """What a run holds."""

    rank: Usage
    agent: Usage
    processes: int
    files: int


def count(pid: int) -> Usage:
    """What a process holds."""
    process = Path("/proc") / str(pid)
    return Usage(
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        (process / "maps").read_text().count(" /dev/shm/"),
    )


def count_all(run: TrainingRun, survivor: int) -> Totals:
    """What the surviving rank, its agent and the run hold."""
    files = sum(1 for path in (run.folder / "node-0").rglob("*") if path.is_file())
    return Totals(count(survivor), count(run.agents()["node-0"]), len(run.processes()), files)


def is_no_more(after: Totals, before: Totals) -> bool:
    """Whether the run holds no more than before, but for what comes and goes."""
    pairs = ((after.rank, before.rank), (after.agent, before.agent))
    return (after.processes, after.files) == (before.processes, before.files) and all(
        now.descriptors <= then.descriptors + OF_THE_MOMENT
        and now.threads <= then.threads + OF_THE_MOMENT
        and now.shared_memory <= then.shared_memory
        for now, then in pairs
    )


def wait_for_steps(run: TrainingRun, after: int = 0) -> dict[int, Rank]:
    """The ranks by their numbers, once both train in the same group, later than step `after`."""

    def are_there() -> dict[int, Rank]:
        ranks = {rank.number: rank for rank in run.ranks()}
        beats = [rank.beat for rank in ranks.values()]
        ready = (
            len(beats) == 2
            and all(beat.phase.name in ("STEP", "DATA") and beat.step > after for beat in beats)
            and len({beat.generation for beat in beats}) == 1
        )
        return ranks if ready else {}

    found: dict[int, Rank] = run.wait_until(are_there, "both ranks to train", every=0.005)
    return found


def regroup(run: TrainingRun, times: int) -> None:
    """Lose rank 1 so often, each time after progress, since equal failures are retried more and
    more slowly; and the last time when the groups before are old enough.
    """
    lost = wait_for_steps(run)[1]
    for number in range(times):
        if number == times - 1:
            time.sleep(KEEP_SECONDS)  # what is waited for is the age of a group
            lost = wait_for_steps(run)[1]
        kill(lost.pid)
        before, lost = lost, wait_for_steps(run, after=lost.beat.step + 1)[1]
        assert lost.pid != before.pid


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(max(300, 3 * REGROUPS))
def test_many_groups_leave_no_more_behind_than_a_few(tmp_path: Path) -> None:
    train = {
        "workload": "varied:Varied",
        "options": {"norms": True, "pause": 0.005, "keep_groups": KEEP_SECONDS},
        "steps": 1_000_000,
        "globalBatch": 24,
        "emaDecay": 0.9,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 20}},
    }
    code = str(Path(__file__).parent / "code")
    job = describe_job(
        "leaks", nodes=1, procsPerNode=2, maxRestarts=100_000, code=code, train=train
    )
    with TrainingRun(tmp_path, job) as run:
        survivor = wait_for_steps(run)[0].pid
        regroup(run, FEW)
        few = count_all(run, survivor)
        regroup(run, REGROUPS - FEW)
        many = count_all(run, survivor)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_no_more(many, few) and time.monotonic() < deadline:
            many = count_all(run, survivor)  # the agent may just be starting a process
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output()
    assert is_no_more(many, few), f"{many} after {few}"

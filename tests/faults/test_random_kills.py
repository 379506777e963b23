"""Random kills of workers and agents: every run ends well, with the weights of the run that nobody
disturbed.

`make chaos` takes as many seeds as KDIST_SEEDS says (20). A failing seed is in the test's name.
`make test` takes one, drawn by the commit or by KDIST_SEED: that a kill falls into each phase is
held each time by the pairs of faults of `.ci/run`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.draw import read_commit
from tests.patience import soon

from .check_ledger import assert_every_sample_once, assert_repeats_are_equal
from .training_run import PATIENCE, Rank, TrainingRun, describe_job, is_alive, kill

PHASES = ("rendezvous", "start", "step", "save", "exit")
VICTIMS = ("worker", "agent", "several")
KILLS = 2
QUICK = 3
SEEDS = int(os.environ.get("KDIST_SEEDS", "20"))
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)).randrange(
    QUICK
)
EPOCHS, SAMPLES = 6, 1437  # of the training split of `digits`

JOB = describe_job(
    "kills",
    nodes=2,
    maxRestarts=20,
    train={
        "workload": "digits",
        "epochs": EPOCHS,
        "globalBatch": 64,
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 10}, "keep": 3},
    },
)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of a run without faults."""
    with TrainingRun(tmp_path_factory.mktemp("uninterrupted"), JOB) as run:
        assert run.wait() == 0, run.output()
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    weights: str = run.done()["weights"]
    return weights


def plan_kills(seed: int) -> list[tuple[str, str]]:
    """Phase and victim of each kill; three seeds in a row cover all phases, so that no phase is
    left to luck.
    """
    draw = random.Random(seed)
    phases = [PHASES[(KILLS * seed + i) % len(PHASES)] for i in range(KILLS)]
    return [(phase, draw.choice(VICTIMS)) for phase in sorted(phases, key=PHASES.index)]


def in_rendezvous(run: TrainingRun) -> bool:
    """An agent looks for its peers and has not found them yet."""
    for node in run.agents():
        names = [
            e["event"]
            for e in run.log(node)
            if e["event"] in ("rendezvous-started", "rendezvous-completed")
        ]
        if names and names[-1] == "rendezvous-started":
            return True
    return False


def is_in_phase(run: TrainingRun, phase: str) -> Callable[[], bool]:
    """A condition that holds while the run is in the phase."""

    def ranks_in(*names: str) -> list[Rank]:
        return [rank for rank in run.ranks() if rank.beat.phase.name in names]

    conditions: dict[str, Callable[[], bool]] = {
        "rendezvous": lambda: in_rendezvous(run),
        "start": lambda: bool(ranks_in("START", "INIT", "RESTORE")),
        "step": lambda: bool(
            [rank for rank in ranks_in("DATA", "STEP", "SYNC") if rank.beat.step > 15]
        ),
        "save": lambda: any(run.checkpoints.glob("step-*.tmp-*")),
        "exit": lambda: (run.checkpoints / "DONE").exists() or bool(ranks_in("EVALUATE", "EXIT")),
    }
    return conditions[phase]


def has_formed_again(run: TrainingRun, generations: int) -> Callable[[], bool]:
    """A condition that holds once there are more than so many generations."""
    return lambda: len(run.events("generation")) > generations


def strike(run: TrainingRun, victim: str, draw: random.Random) -> int:
    """Kill the drawn victims; returns how many processes were hit."""
    agents, workers = sorted(run.agents().values()), sorted(rank.pid for rank in run.ranks())
    pools = {"worker": workers or agents, "agent": agents, "several": agents + workers}
    pool = [pid for pid in pools[victim] if is_alive(pid)]
    chosen = draw.sample(pool, k=min(len(pool), 2 if victim == "several" else 1))
    for pid in chosen:
        kill(pid)
    return len(chosen)


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed == DRAWN else [pytest.mark.chaos, pytest.mark.wide])
        for seed in range(max(SEEDS, QUICK))
    ],
)
@pytest.mark.sampled
def test_a_run_with_kills_in_every_phase_ends_with_the_weights_of_the_uninterrupted_run(
    seed: int, uninterrupted: str, tmp_path: Path
) -> None:
    draw, hits = random.Random(1000 + seed), Counter[str]()
    with TrainingRun(tmp_path, JOB) as run:
        for phase, victim in plan_kills(seed):
            generations = len(run.events("generation"))
            run.wait_until(is_in_phase(run, phase), f"phase {phase}", every=0.002)
            hits[phase] += strike(run, victim, draw)
            if phase != "exit":
                run.wait_until(has_formed_again(run, generations), "the group to form again")
        assert run.wait(PATIENCE) == 0, run.output()
    missed = [phase for phase, _ in plan_kills(seed) if not hits[phase]]
    assert not missed, f"no kill fell into {missed}"
    assert run.done()["weights"] == uninterrupted
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    assert_repeats_are_equal(run.steps())
    assert soon(lambda: not run.processes()), run.processes()


def test_the_plan_of_three_seeds_has_a_kill_in_every_phase() -> None:
    for first in range(max(SEEDS, QUICK) - QUICK + 1):
        assert {
            phase for seed in range(first, first + QUICK) for phase, _ in plan_kills(seed)
        } == set(PHASES)

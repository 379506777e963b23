"""Pairs of faults, the second at most two seconds after the first: every run ends with the weights
of the uninterrupted run.

A seed draws one run of four pairs; four seeds in a row have one node and two, loaders with
processes and without, and each phase at least three times. CI takes QUICK seeds, `make chaos` as
many as make KDIST_PAIRS pairs (200). How long a run stood still is reported at the end of the
tests.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kdist_trainer.formats import LEDGER, STEPS_FILE
from tests.patience import soon

from .check_ledger import assert_every_sample_once, assert_repeats_are_equal
from .stall import Stall
from .test_random_kills import PHASES, SAMPLES, is_in_phase
from .training_run import PATIENCE, TrainingRun, describe_job, is_alive, kill

VICTIMS = ("worker", "worker", "agent")  # an agent takes seconds to import torch again
APART_SECONDS = 2.0
PAIRS_OF_A_RUN = 4
QUICK = 4
RUNS = max(QUICK, int(os.environ.get("KDIST_PAIRS", "200")) // PAIRS_OF_A_RUN)
EPOCHS = 16


@dataclass(frozen=True)
class Pair:
    """A fault in `phase`, and a second one `seconds` later wherever the run then is."""

    phase: str
    victims: tuple[str, str]
    seconds: float


def describe(seed: int) -> dict[str, Any]:
    """The job of a seed: one or two nodes, a loader with or without processes of its own."""
    train = {
        "workload": "digits",
        "epochs": EPOCHS,
        "globalBatch": 64,
        "syncEverySteps": 5,
        "loader": {"workers": (0, 2)[seed // 2 % 2]},
        "checkpoint": {"every": {"steps": 10}, "keep": 3},
    }
    return describe_job("pairs", nodes=1 + seed % 2, maxRestarts=20, train=train)


def plan_pairs(seed: int) -> list[Pair]:
    """Four of the five phases, in the order in which a run comes to them."""
    draw = random.Random(3000 + seed)
    phases = [phase for number, phase in enumerate(PHASES) if number != seed % len(PHASES)]
    return [
        Pair(
            phase,
            (draw.choice(VICTIMS), draw.choice(VICTIMS)),
            round(draw.uniform(0, APART_SECONDS), 2),
        )
        for phase in phases
    ]


def uninterrupted(nodes: int, folder: Path) -> str:
    """The weights' hash of a run on so many nodes without faults and loader processes; made once
    for all workers of pytest.
    """
    kept = folder / f"uninterrupted-{nodes}"
    with (folder / f"{kept.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with TrainingRun(folder / f"{kept.name}.run", describe(nodes - 1)) as run:
                assert run.wait() == 0, run.output()
            kept.write_text(run.done()["weights"])
    return kept.read_text()


def victims_of(run: TrainingRun, victim: str) -> list[int]:
    """Live processes of that kind."""
    pids = [rank.pid for rank in run.ranks()] if victim == "worker" else list(run.agents().values())
    return sorted(pid for pid in pids if is_alive(pid))


def strike(run: TrainingRun, victim: str, draw: random.Random) -> bool:
    """Kill one as soon as there is one; False where the run has ended before."""
    pids: list[int] = []

    def found() -> bool:
        pids[:] = victims_of(run, victim)
        return bool(pids) or run.process.poll() is not None

    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, f"no {victim} in {PATIENCE} s\n{run.output()[-6000:]}"
        time.sleep(0.002)
    if pids:
        kill(draw.choice(pids))
    return bool(pids)


def is_time(run: TrainingRun, phase: str) -> Callable[[], bool]:
    """A condition that holds while the run is in the phase, or where a busy machine let a short one
    pass unseen.
    """
    in_phase, steps = is_in_phase(run, phase), is_in_phase(run, "step")
    return lambda: in_phase() or (phase in ("rendezvous", "start") and steps())


def strike_twice(run: TrainingRun, pair: Pair, draw: random.Random) -> bool:
    """Both faults of a pair; whether both found somebody."""
    run.wait_until(is_time(run, pair.phase), f"phase {pair.phase}", every=0.002)
    first = strike(run, pair.victims[0], draw)
    time.sleep(pair.seconds)
    return strike(run, pair.victims[1], draw) and first


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed < QUICK else [pytest.mark.wide]) for seed in range(RUNS)],
)
def test_a_run_with_pairs_of_faults_ends_with_the_weights_of_the_uninterrupted_run(
    seed: int,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
) -> None:
    job, pairs, draw = describe(seed), plan_pairs(seed), random.Random(4000 + seed)
    shared = tmp_path_factory.getbasetemp()
    expected = uninterrupted(
        job["spec"]["nodes"], shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    )
    with TrainingRun(tmp_path, job) as run, Stall(run.checkpoints / LEDGER / STEPS_FILE) as still:
        missed = [
            pair for pair in pairs if not strike_twice(run, pair, draw) and pair.phase != "exit"
        ]
        assert run.wait() == 0, run.output()
    record_property(
        "measured",
        f"pairs of faults, seed {seed}: the longest stall was {still.longest:.1f} s",
    )
    assert run.done()["weights"] == expected
    assert not missed, f"the run had ended before {missed}"
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    assert_repeats_are_equal(run.steps())
    # An agent that is killed right after it has formed a group may not have written its event.
    reasons = {event["generation"]: event["reason"] for event in run.events("generation")}
    assert reasons.pop(1, "start") == "start"
    assert set(reasons.values()) == {"failure"}, (
        "every further generation is a restart, and paid as one"
    )
    assert soon(lambda: not run.processes()), run.processes()


def test_the_plan_of_four_seeds_has_both_sizes_both_loaders_and_every_phase() -> None:
    for first in range(RUNS - QUICK + 1):
        seeds = range(first, first + QUICK)
        jobs = [describe(seed)["spec"] for seed in seeds]
        assert len({(job["nodes"], job["train"]["loader"]["workers"]) for job in jobs}) == QUICK
        phases = [pair.phase for seed in seeds for pair in plan_pairs(seed)]
        assert min(phases.count(phase) for phase in PHASES) >= QUICK - 1

"""Random kills of a training with state that is no parameter: DONE, the export and an uninterrupted
run agree.

Batch norms, dropout, samples and losses drawn from NumPy's and Python's generators, two groups of
parameters, accumulation, clipping, a moving average, a MultiStepLR and a frozen submodule; the last
step leaves one sample for each forward pass.

`make chaos` takes KDIST_SEEDS seeds (20), which go through ranks, strategies and precisions;
`.ci/run` one, drawn by the commit or by KDIST_SEED.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdist_trainer.data.step_plan import ShardAssignment
from tests.draw import read_commit
from tests.patience import soon
from tests.trainer.checkpoint.exported import digest_of_export

from .check_ledger import assert_every_sample_once, assert_repeats_are_equal
from .test_random_kills import has_formed_again, is_in_phase, plan_kills, strike
from .training_run import TrainingRun, describe_job

SEEDS = int(os.environ.get("KDIST_SEEDS", "20"))
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)).randrange(
    SEEDS
)
EPOCHS, SAMPLES, BATCH, SHARDS = 6, 601, 48, 6


class Cell(NamedTuple):
    """How a training is spread, and in what numbers."""

    ranks: int
    strategy: str
    precision: str


class Ending(NamedTuple):
    """What a run leaves."""

    weights: str
    averages: str
    metrics: dict[str, float]


CELLS = [
    Cell(ranks, strategy, precision)
    for precision in ("fp32", "bf16")
    for strategy in ("ddp", "fsdp")
    for ranks in (2, 3, 1)
]


def describe(cell: Cell) -> dict[str, Any]:
    """The job of a cell."""
    train = {
        "workload": "stateful:Stateful",
        "options": {"length": SAMPLES, "pause": 0.005},
        "epochs": EPOCHS,
        "globalBatch": BATCH,
        "virtualShards": SHARDS,
        "clipGradNorm": 1.0,
        "emaDecay": 0.98,
        "evaluate": "end",
        "evaluateEverySteps": 15,
        "strategy": cell.strategy,
        "precision": cell.precision,
        "optimizer": {"name": "adamw", "learningRate": 0.01},
        "syncEverySteps": 5,
        "checkpoint": {"every": {"steps": 10}, "keep": 3},
    }
    code = str(Path(__file__).parent / "code")
    return describe_job("stateful", nodes=cell.ranks, maxRestarts=20, code=code, train=train)


def ending(run: TrainingRun) -> Ending:
    """What a run that is done has left; every sample was used once."""
    assert_every_sample_once(run.steps(), total=EPOCHS * SAMPLES)
    done = run.done()
    return Ending(
        done["weights"],
        digest_of_export(run.checkpoints, step=done["step"], average=True),
        done["metrics"],
    )


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Ending]:
    """The endings of runs without faults, as they are asked for."""

    class Endings(dict[Cell, Ending]):
        def __missing__(self, cell: Cell) -> Ending:
            with TrainingRun(tmp_path_factory.mktemp("uninterrupted"), describe(cell)) as run:
                assert run.wait() == 0, run.output()
            self[cell] = ending(run)
            return self[cell]

    return Endings()


def test_every_rank_of_every_cell_accumulates_gradients() -> None:
    ranks = [(rank, cell.ranks) for cell in CELLS for rank in range(cell.ranks)]
    passes = {len(ShardAssignment(BATCH, SHARDS, rank, size).chunks(BATCH)) for rank, size in ranks}
    assert passes == {6, 3, 2}


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s == DRAWN else [pytest.mark.wide]) for s in range(SEEDS)]
)
def test_a_killed_training_ends_with_all_the_state_of_the_uninterrupted_one(
    seed: int, uninterrupted: dict[Cell, Ending], tmp_path: Path
) -> None:
    cell, draw, hits = CELLS[seed % len(CELLS)], random.Random(2000 + seed), Counter[str]()
    with TrainingRun(tmp_path, describe(cell)) as run:
        for phase, victim in plan_kills(seed):
            generations = len(run.events("generation"))
            run.wait_until(is_in_phase(run, phase), f"phase {phase}", every=0.002)
            hits[phase] += strike(run, victim, draw)
            if phase != "exit":
                run.wait_until(has_formed_again(run, generations), "the group to form again")
        assert run.wait() == 0, run.output()
    missed = [phase for phase, _ in plan_kills(seed) if not hits[phase]]
    assert not missed, f"no kill fell into {missed}"
    assert ending(run) == uninterrupted[cell], cell
    assert_repeats_are_equal(run.steps())
    assert soon(lambda: not run.processes()), run.processes()

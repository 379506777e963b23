"""What a forward pass changes besides the weights belongs to the state: whatever it is, however the
model is compiled and whichever parameters have an optimizer state, a run that loses a rank, is
restarted, or is stopped and resumed ends with the weights of the uninterrupted one.

`make chaos` runs every cell; `.ci/run` two, drawn by the commit or by KDIST_SEED.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from kdist_trainer.config import Exit
from tests.draw import read_commit

from .forked_run import ForkedRun
from .training_run import describe_job, kill, wait_for_step

COMPILED = ("plain", "whole", "part")
STATES = ("all", "some", "none")
MOVES = ("no_grad", "data", "extra", "late", "none", "toggle")
FAULTS = ("inPlace", "restart", "stop")
RANKS = (2, 3)
STEPS = 24


class Cell(NamedTuple):
    """What a training consists of, and what happens to it."""

    compiled: str
    states: str
    moves: str
    fault: str
    ranks: int


CELLS = [Cell(*one) for one in product(COMPILED, STATES, MOVES, FAULTS, RANKS)]
DRAWN = random.Random(os.environ.get("KDIST_SEED") or read_commit(Path(__file__).parent)).sample(
    CELLS, 2
)


def describe(cell: Cell) -> dict[str, object]:
    """The job of a cell."""
    options = {"compiled": cell.compiled, "states": cell.states, "moves": cell.moves}
    return describe_job(
        "moved",
        nodes=1,
        procsPerNode=cell.ranks,
        maxRestarts=1000,
        code=str(Path(__file__).parent / "code"),
        train={
            "workload": "moved:Moved",
            "steps": STEPS,
            "globalBatch": 24,
            "microBatch": 4,
            "virtualShards": cell.ranks,
            "syncEverySteps": 3,
            "recovery": "restart" if cell.fault == "restart" else "auto",
            "checkpoint": {"every": {"steps": 4}},
            # after the save of step 4: what moves then is found by the recovery
            "options": {**options, "pause": 0.02, "late": 24 // cell.ranks + 2},
        },
    )


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], str]:
    """The weights of runs without faults and without compilation, as they are asked for."""
    found: dict[Cell, str] = {}

    def find(cell: Cell) -> str:
        plain = cell._replace(compiled="plain", fault="inPlace")
        if plain not in found:
            with ForkedRun(tmp_path_factory.mktemp("uninterrupted"), describe(plain)) as run:
                assert run.wait() == 0, run.output()
            found[plain] = run.done()["weights"]
        return found[plain]

    return find


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(one, marks=[] if one in DRAWN else [pytest.mark.wide]) for one in CELLS],
    ids=["-".join(map(str, one)) for one in CELLS],
)
def test_a_fault_changes_nothing(
    cell: Cell, uninterrupted: Callable[[Cell], str], tmp_path: Path
) -> None:
    compiles = [] if cell.compiled == "plain" else ["functorch.compile"]
    with ForkedRun(tmp_path, describe(cell), imports=compiles) as run:
        for step in (6, 15):
            ranks = wait_for_step(run, step, ranks=cell.ranks)
            if cell.fault == "stop":
                assert run.stop() == Exit.STOPPED, run.output()
                run.start()
                continue
            kill(ranks[1])
            after = wait_for_step(run, step + 2, ranks=cell.ranks)
            if cell.fault == "inPlace":
                assert after[0] == ranks[0], "the survivor has not kept its process"
        assert run.wait() == 0, run.output()
    assert run.done()["weights"] == uninterrupted(cell)

"""Every strategy in every precision on 1, 2 and 4 ranks learns what one rank learns, or says why it
does not run.

`KDIST_REGENERATE=1 pytest tests/trainer/training/test_cells.py -k table` writes the table of
docs/explanation/strategies.md again.
"""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path

import pytest

from tests.trainer.training.cells import (
    OFFLOADED,
    PRECISIONS,
    SIZES,
    STEPS,
    STRATEGIES,
    TOLERANCE,
    WORKLOADS,
    distance,
    learn,
    refusal,
    table,
)
from tests.trainer.training.group import RankFailed

pytestmark = pytest.mark.processes
CELLS = [(work, *rest) for work, *rest in product(WORKLOADS, STRATEGIES, PRECISIONS, SIZES)]
OK = [
    (workload, strategy, *rest, size)
    for workload, strategy, *rest, size in CELLS
    if not refusal(workload, strategy, size)
]
TELLING = [
    ("digits", "fsdp", "fp32", 4),
    ("digits", "hsdp", "bf16", 2),
    ("digits", "ddp", "fp16", 2),
    ("digits", "ddp", "bf16-params", 2),
    ("digits", "data_parallel", "tf32", 1),
    ("gpt", "tensor", "fp16", 4),
    ("digits", "pipeline", "bf16", 4),
]
"""The cells that CI trains; the others are for a longer run."""
FEW = 20
"""Steps of the trainings that run each time: enough to tell a gradient that is not the whole
group's.
"""
REFUSED = sorted(
    {
        (workload, strategy, size)
        for workload, strategy, _, size in CELLS
        if refusal(workload, strategy, size)
    }
)


Courses = dict[tuple[str, str, int], list[float]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Courses:
    """Losses of one rank with ddp, by workload, precision and number of steps, as they are asked
    for.
    """

    class Asked(Courses):
        def __missing__(self, key: tuple[str, str, int]) -> list[float]:
            workload, precision, steps = key
            self[key] = learn(
                tmp_path_factory.mktemp("alone"), 1, workload, "ddp", precision, steps=steps
            )
            return self[key]

    return Asked()


@pytest.mark.sampled
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("workload", "strategy", "precision", "size"),
    [pytest.param(*cell, marks=[] if cell in TELLING else [pytest.mark.wide]) for cell in OK],
)
def test_a_cell_learns_what_one_rank_learns(
    workload: str, strategy: str, precision: str, size: int, alone: Courses, tmp_path: Path
) -> None:
    found = learn(tmp_path, size, workload, strategy, precision)
    assert distance(found, alone[workload, precision, STEPS]) <= TOLERANCE[precision]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(strategy, marks=[pytest.mark.chaos] if strategy == OFFLOADED else [])
        for strategy in STRATEGIES
        if not refusal("gpt", strategy, 2)
    ],
)
def test_two_ranks_learn_what_one_learns(strategy: str, alone: Courses, tmp_path: Path) -> None:
    found = learn(tmp_path, 2, "gpt", strategy, "fp32", steps=FEW)
    assert distance(found, alone["gpt", "fp32", FEW]) <= TOLERANCE["fp32"]


@pytest.mark.parametrize(
    ("workload", "strategy", "size"),
    [
        pytest.param(*cell, marks=[] if cell[2] == 2 else [pytest.mark.chaos, pytest.mark.wide])
        for cell in REFUSED
    ],
)
def test_what_cannot_run_says_why(workload: str, strategy: str, size: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=refusal(workload, strategy, size)):
        learn(tmp_path, size, workload, strategy, "fp32")


def test_the_table_of_the_documentation_is_what_is_tested_here() -> None:
    page = Path(__file__).parents[3] / "docs/explanation/strategies.md"
    made = re.compile(r"(<!-- made by .*? -->\n).*(<!-- end -->\n)", re.DOTALL)
    fresh = made.sub(lambda found: f"{found[1]}\n{table()}\n\n{found[2]}", page.read_text())
    if os.environ.get("KDIST_REGENERATE"):
        page.write_text(fresh)
    assert page.read_text() == fresh

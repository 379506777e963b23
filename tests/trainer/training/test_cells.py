"""Every strategy in every precision on 1, 2 and 4 ranks learns what one rank learns, or says why it does not run.

`KDIST_REGENERATE=1 pytest tests/trainer/training/test_cells.py -k table` writes the table of docs/strategies.md anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.trainer.training.cells import PRECISIONS, SIZES, STRATEGIES, TOLERANCE, WORKLOADS, distance, learn, refusal, table
from tests.trainer.training.group import RankFailed

pytestmark = pytest.mark.processes
CELLS = [(strategy, precision, size) for strategy in STRATEGIES for precision in PRECISIONS for size in SIZES]
OK = [cell for cell in CELLS if not refusal(cell[0], cell[2])]
TELLING = [("fsdp", "fp32", 4), ("hsdp", "bf16", 2), ("ddp", "fp16", 2), ("ddp", "bf16-params", 2), ("data_parallel", "tf32", 1)]
"""The cells that CI trains, of digits; the others are for a longer run."""
COURSES = [(workload, *cell) for cell in OK for workload in WORKLOADS]
REFUSED = sorted({(strategy, size) for strategy, _, size in CELLS if refusal(strategy, size)})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[float]]:
    """Losses of one rank with ddp, by workload and precision, as they are asked for."""

    class Courses(dict[tuple[str, str], list[float]]):
        def __missing__(self, key: tuple[str, str]) -> list[float]:
            self[key] = learn(tmp_path_factory.mktemp("alone"), 1, key[0], "ddp", key[1])
            return self[key]

    return Courses()


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("workload", "strategy", "precision", "size"),
    [
        pytest.param(*course, marks=[] if course[0] == "digits" and course[1:] in TELLING else [pytest.mark.wide])
        for course in COURSES
    ],
)
def test_a_cell_learns_what_one_rank_learns(
    workload: str, strategy: str, precision: str, size: int, alone: dict[tuple[str, str], list[float]], tmp_path: Path
) -> None:
    found = learn(tmp_path, size, workload, strategy, precision)
    assert distance(found, alone[workload, precision]) <= TOLERANCE[precision]


@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if not refusal(strategy, 2)])
def test_two_ranks_learn_what_one_learns(strategy: str, alone: dict[tuple[str, str], list[float]], tmp_path: Path) -> None:
    found = learn(tmp_path, 2, "gpt", strategy, "fp32")
    assert distance(found, alone["gpt", "fp32"]) <= TOLERANCE["fp32"]


@pytest.mark.parametrize(("strategy", "size"), REFUSED)
def test_what_cannot_run_says_why(strategy: str, size: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=refusal(strategy, size)):
        learn(tmp_path, size, "digits", strategy, "fp32")


def test_the_table_of_the_documentation_is_what_is_tested_here() -> None:
    page = Path(__file__).parents[3] / "docs/strategies.md"
    made = re.compile(r"(<!-- made by .*? -->\n).*(<!-- end -->\n)", re.DOTALL)
    fresh = made.sub(lambda found: f"{found[1]}\n{table()}\n\n{found[2]}", page.read_text())
    if os.environ.get("KDIST_REGENERATE"):
        page.write_text(fresh)
    assert page.read_text() == fresh

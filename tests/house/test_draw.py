"""The plugin behind the one disruptive test of each CI run: its seed is printed and draws the same
test again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.house.test_make import make
from tests.house.tree import ROOT

SAMPLE = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_a_number(number):
    assert number >= 0
"""


def draw(folder: Path, seed: str = "") -> tuple[str, str]:
    """(the test that was drawn, the seed that was printed)."""
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "KDIST_SEED": seed,
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.draw", "--draw"]
    printed = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "1 passed, 19 deselected" in printed
    found = re.search(
        r"^drawn from 20 tests: (\S+) \(KDIST_SEED=(\S+) draws it again\)$", printed, re.MULTILINE
    )
    assert found
    return found[1], found[2]


def test_a_seed_draws_the_same_test_again_and_others_draw_others(tmp_path: Path) -> None:
    drawn = [draw(tmp_path, f"seed-{number}")[0] for number in range(4)]
    assert len(set(drawn)) > 1
    assert draw(tmp_path, "seed-0") == (drawn[0], "seed-0")


def test_without_a_seed_the_draw_prints_the_one_that_repeats_it(tmp_path: Path) -> None:
    drawn, seed = draw(tmp_path)
    assert draw(tmp_path, seed) == (drawn, seed)


def test_ci_runs_one_drawn_disruptive_test_and_counts_it() -> None:
    (line,) = [
        line
        for line in make("--dry-run", "e2e", "NARROW=1").stdout.splitlines()
        if "/disruptive.xml" in line
    ]
    assert "-p tests.draw --draw" in line
    assert "disruptive" in (ROOT / ".ci" / "run").read_text()

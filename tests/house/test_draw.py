"""The plugin behind the one disruptive test and the sampled tests of each CI run: its seed is
printed and draws the same tests again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_make import make
from tests.house.tree import ROOT

SAMPLE = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("number", range(40))
def test_a_number(number):
    assert number >= 0

def test_that_always_runs():
    assert True
"""


def draw(folder: Path, seed: str = "", how: str = "one") -> tuple[list[str], str, str]:
    """(the tests that ran, what was drawn as it is printed, the seed that was printed)."""
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = sampled\n")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "KDIST_SEED": seed,
    }
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.draw", f"--draw={how}"]
    printed = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout
    by = re.search(r"^tests are drawn with KDIST_SEED=(\S+); set it", printed, re.MULTILINE)
    found = re.search(r"^drawn from \d+ tests: (.+)$", printed, re.MULTILINE)
    assert by
    assert found
    return re.findall(r"^(\S+) PASSED", printed, re.MULTILINE), found[1], by[1]


def test_a_seed_draws_the_same_test_again_and_others_draw_others(tmp_path: Path) -> None:
    drawn = [draw(tmp_path, f"seed-{number}")[0] for number in range(4)]
    assert all(len(names) == 1 for names in drawn)
    assert len({names[0] for names in drawn}) > 1
    assert draw(tmp_path, "seed-0") == (drawn[0], drawn[0][0], "seed-0")


def test_a_tenth_of_the_sampled_tests_and_all_others_run(tmp_path: Path) -> None:
    first, printed, _ = draw(tmp_path, "seed-0", "sampled")
    second, _, _ = draw(tmp_path, "seed-1", "sampled")
    assert printed == "4 tests"
    assert len(first) == len(second) == 5
    assert first != second
    assert {"test_sample.py::test_that_always_runs"} == {
        name for name in first + second if "[" not in name
    }


def test_what_failed_is_tried_again_and_nothing_is_drawn_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE.replace("number >= 0", "number < 0"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sampled\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "tests.draw", "--draw=sampled"]

    def fail(seed: str, *more: str) -> list[str]:
        printed = subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env=environment | {"KDIST_SEED": seed},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        return sorted(re.findall(r"^FAILED (\S+)", printed, re.MULTILINE))

    drawn = fail("seed-0")
    assert drawn
    assert fail("seed-1", "--last-failed") == drawn


def test_without_a_seed_the_draw_prints_the_one_that_repeats_it(tmp_path: Path) -> None:
    drawn, name, seed = draw(tmp_path)
    assert draw(tmp_path, seed) == (drawn, name, seed)


def test_ci_runs_one_drawn_disruptive_test_and_counts_it() -> None:
    (line,) = [
        line
        for line in make("--dry-run", "disruptive", "NARROW=1").stdout.splitlines()
        if "/disruptive.xml" in line
    ]
    assert "-p tests.draw --draw=one" in line
    script = (ROOT / ".ci" / "run").read_text()
    assert "make disruptive AGAIN=1 NARROW=1" in script
    assert 'summary.py fast chaos acceptance e2e "${disruptive[@]}"' in script


def test_whoever_asks_for_no_draw_stops_machines_after_the_other_tests_on_the_cluster() -> None:
    assert "/disruptive.xml" in make("--dry-run", "e2e", "NARROW=").stdout
    assert "/disruptive.xml" not in make("--dry-run", "e2e", "NARROW=1").stdout
    assert "/disruptive.xml" not in make("--dry-run", "e2e", "KDIST_E2E=kubeconfig").stdout


@pytest.mark.parametrize("tier", ["fast", "chaos", "e2e"])
def test_ci_runs_a_tenth_of_what_is_marked_sampled_and_make_runs_all(tier: str) -> None:
    def is_sampled(*settings: str) -> bool:
        printed = make("--dry-run", tier, *settings).stdout
        (line,) = [line for line in printed.splitlines() if f"/{tier}.xml" in line]
        return "-p tests.draw --draw=sampled" in line

    assert is_sampled("NARROW=1")
    assert not is_sampled("NARROW=")
    assert (
        f"make {'test' if tier == 'fast' else tier} AGAIN=1 NARROW=1"
        in (ROOT / ".ci" / "run").read_text()
    )

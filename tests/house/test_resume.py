"""The plugin behind `make chaos`: a run that was stopped goes on, a run that is over starts
again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT

BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # to load all plugins takes five times as long
SAMPLE = """
import os, pytest

@pytest.mark.parametrize("number", range(4))
def test_that_a_number_is_not_the_bad_one(number):
    assert str(number) != os.environ.get("BAD")
"""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(root: Path, *args: str, bad: str = "") -> str:
    """Last line of a pytest run that notes what passed in `root/notes/passed`."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-p",
        "tests.resume",
        "--resume-file=notes/passed",
        "tests",
        *args,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "BAD": bad, "PYTEST_ADDOPTS": "", **BARE}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "shared"])
@pytest.mark.sampled
def test_a_run_that_failed_repeats_only_what_has_not_passed(
    sample: Path, workers: list[str]
) -> None:
    assert "1 failed, 3 passed" in run(sample, *workers, bad="2")
    assert "1 passed" in run(sample, *workers)


def test_a_run_that_was_stopped_goes_on(sample: Path) -> None:
    assert "1 failed, 2 passed" in run(sample, "-x", bad="2")
    assert "2 passed, 2 deselected" in run(sample)


@pytest.mark.sampled
def test_a_run_that_is_over_starts_again(sample: Path) -> None:
    assert "4 passed" in run(sample)
    assert not (sample / "notes" / "passed").exists()
    assert "4 passed" in run(sample)


def test_changed_sources_make_every_test_run_again(sample: Path) -> None:
    run(sample, bad="2")
    with (sample / "tests" / "test_sample.py").open("a") as file:
        file.write("# changed\n")
    assert "4 passed" in run(sample)

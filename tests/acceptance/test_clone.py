"""A fresh clone: the README's first command sets everything up and shows the promise; the second
time there is nothing to do.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.house.tree import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone that nobody else touches."""
    folder = tmp_path_factory.mktemp("fresh") / "kdist"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def make(target: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run make without what the make around this test hands down."""
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in outer} | extra
    return subprocess.run(
        ["make", target], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def demo(fresh: Path) -> subprocess.CompletedProcess[str]:
    """The ended `make demo` of the clone, which sets it up."""
    return make("demo", fresh, COMPILE="")  # compiling pays off only after many commands


def test_make_demo_sets_up_trains_loses_a_worker_and_ends_well(
    fresh: Path, demo: subprocess.CompletedProcess[str]
) -> None:
    assert demo.returncode == 0, demo.stdout[-4000:] + demo.stderr[-4000:]
    promises = [line for line in demo.stdout.splitlines() if line.startswith(("✓", "✗"))]
    assert [line[0] for line in promises] == ["✓"] * 4
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], cwd=fresh, capture_output=True, text=True, check=True
    )
    assert dirty.stdout == ""


@pytest.mark.usefixtures("demo")
def test_the_second_set_up_takes_no_time_and_no_network(fresh: Path) -> None:
    assert (fresh / ".venv" / ".ready").exists(), "make demo has set up"
    nowhere = "http://127.0.0.1:9"
    started = time.monotonic()
    done = make(
        "setup", fresh, HTTPS_PROXY=nowhere, HTTP_PROXY=nowhere, UV_OFFLINE="1", PIP_NO_INDEX="1"
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 60

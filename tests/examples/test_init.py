"""What `kdist init` writes with code is run as it stands: its test in seconds, then its job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.spec import scaffold

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
TEMPLATES = [name for name in scaffold.TEMPLATES if scaffold.read_code(name)]
SLOW = pytest.mark.chaos, pytest.mark.sampled
"""Where the framework alone takes many seconds to import."""
each_template = pytest.mark.parametrize(
    "template",
    [
        pytest.param(name, marks=SLOW if name in ("huggingface", "lightning") else ())
        for name in TEMPLATES
    ],
)


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@each_template
@pytest.mark.sampled
def test_its_test_passes(template: str, tmp_path: Path) -> None:
    run(tmp_path, "kdist", "init", "-t", template)
    assert "1 passed" in run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "src")


@each_template
@pytest.mark.sampled
def test_its_job_trains(template: str, tmp_path: Path) -> None:
    run(tmp_path, "kdist", "init", "-t", template)
    assert f"{template} is done." in run(tmp_path, "kdist", "run", "job.yaml")
    listed = run(tmp_path, "kdist", "checkpoints", template)
    assert "step" in listed.lower()

"""The built wheels alone, far from any source: the way from nothing to a trained model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kdist import __version__

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]


def kdist(*args: str, cwd: Path, env: dict[str, str]) -> str:
    """Output of a kdist command that must succeed."""
    done = subprocess.run(
        ["kdist", *args], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_packages_come_from_the_wheels(
    installed: Path, clean_env: dict[str, str], tmp_path: Path
) -> None:
    program = "import kdist, kdist_trainer; print(kdist.__file__); print(kdist_trainer.__file__)"
    done = subprocess.run(
        [installed / "python", "-c", program],
        cwd=tmp_path,
        env=clean_env,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [True, True]
    assert [Path(line).is_relative_to(installed.parent) for line in done.stdout.split()] == expected


def test_a_newcomer_goes_from_nothing_to_a_trained_model(
    clean_env: dict[str, str], tmp_path: Path
) -> None:
    assert __version__ in kdist("version", cwd=tmp_path, env=clean_env)
    kdist("init", cwd=tmp_path, env=clean_env)
    assert "job.yaml" in kdist("validate", "job.yaml", cwd=tmp_path, env=clean_env)
    report = json.loads(kdist("run", "job.yaml", "-o", "json", cwd=tmp_path, env=clean_env))
    assert report["metrics"]["accuracy"] >= 0.97


def test_the_schema_and_every_explanation_are_in_the_wheel(
    clean_env: dict[str, str], tmp_path: Path
) -> None:
    schema = kdist("explain", "-o", "jsonschema", cwd=tmp_path, env=clean_env)
    assert json.loads(schema)["title"] == "TrainingJob of kdist"
    assert "globalBatch" in kdist("explain", "spec.train", cwd=tmp_path, env=clean_env)

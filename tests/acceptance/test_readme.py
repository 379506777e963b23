"""The README's session, typed line by line into a real shell by someone who has the wheels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.house.readme import typed
from tests.house.tree import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


def test_every_command_of_the_readme_succeeds(clean_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in typed():
        done = subprocess.run(
            ["bash", "-euc", line],
            cwd=tmp_path,
            env=clean_env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"$ {line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

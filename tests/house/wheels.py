"""Builds the wheels from the tree, with the locked build backend and without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOMS = ("cli", "controller", "trainer")


def build(tree: Path, into: Path) -> list[Path]:
    """Wheels of all distributions of the checkout at `tree`."""
    for room in ROOMS:
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "--target",
            "wheel",
            "--directory",
            str(into),
        ]
        subprocess.run(command, cwd=tree / room, check=True, capture_output=True)
    return sorted(into.glob("*.whl"))

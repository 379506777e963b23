"""What every test may ask for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Path of a program outside Python, as in `program("strace")`; without it the test is skipped, and fails under CI."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None and os.environ.get("CI"):
            pytest.fail(f"{name} is not installed, which tests/install-system.sh should have done")
        if path is None:
            pytest.skip(f"{name} is not installed: see tests/install-system.sh")
        return path

    return find

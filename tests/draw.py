"""A pytest plugin that runs one drawn test of those that were chosen.

`pytest -p tests.draw --draw …` draws by `KDIST_SEED`, which repeats a draw, else by the commit, so
that a second try of a run meets the same test and the next commit another.
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draw",
        action="store_true",
        help="run one test, drawn by KDIST_SEED or else by the commit",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--draw"):
        config.pluginmanager.register(Draw(read_seed(config.rootpath)), "draw")


class Draw:
    """One draw, by a text."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.printed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if not items:
            return
        drawn = random.Random(self.seed).choice(sorted(items, key=lambda item: item.nodeid))
        self.printed = (
            f"drawn from {len(items)} tests: {drawn.nodeid} (KDIST_SEED={self.seed} draws it again)"
        )
        config.hook.pytest_deselected(items=[item for item in items if item is not drawn])
        items[:] = [drawn]

    def pytest_report_collectionfinish(self) -> str:
        return self.printed


def read_seed(root: Path) -> str:
    """`KDIST_SEED`, or else the commit."""
    return os.environ.get("KDIST_SEED") or read_commit(root)


def read_commit(root: Path) -> str:
    """The commit that is tested, in short; "0" outside of git."""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"

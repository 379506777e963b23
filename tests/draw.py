"""A pytest plugin that runs a drawn part of the tests that were chosen.

`--draw=one` runs one of them. `--draw=sampled` runs a tenth of those that are marked `sampled`,
and all others. `KDIST_SEED` repeats a draw; without it the commit draws, so that a second try of a
run meets the same tests and the next commit others.
"""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

SHARE = 10
"""One in so many sampled tests runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draw",
        choices=["one", "sampled"],
        help="run one test, or a tenth of those marked `sampled`, by KDIST_SEED or the commit",
    )


def pytest_configure(config: pytest.Config) -> None:
    how = config.getoption("--draw")
    if how:
        config.pluginmanager.register(Draw(read_seed(config.rootpath), how), "draw")


class Draw:
    """One draw, by a text."""

    def __init__(self, seed: str, how: str) -> None:
        self.seed = seed
        self.how = how
        self.printed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if config.getoption("lf") and config.cache and config.cache.get("cache/lastfailed", {}):
            return  # those that failed have been drawn
        pool = sorted(
            (item for item in items if self.how == "one" or item.get_closest_marker("sampled")),
            key=lambda item: item.nodeid,
        )
        if not pool:
            return
        count = 1 if self.how == "one" else -(-len(pool) // SHARE)
        drawn = random.Random(self.seed).sample(pool, count)
        names = drawn[0].nodeid if count == 1 else f"{count} tests"
        self.printed = f"drawn from {len(pool)} tests: {names}"
        left_out = set(pool).difference(drawn)
        config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left_out]

    def pytest_report_header(self) -> str:
        return f"tests are drawn with KDIST_SEED={self.seed}; set it to draw the same ones again"

    def pytest_report_collectionfinish(self) -> str:
        return self.printed  # not where pytest-xdist collects the tests


def read_seed(root: Path) -> str:
    """`KDIST_SEED`, or else the commit."""
    return os.environ.get("KDIST_SEED") or read_commit(root)


def read_commit(root: Path) -> str:
    """The commit that is tested, in short; "0" outside of git."""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"

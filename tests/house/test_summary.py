"""What `.ci/run` ends with: a table of the tiers, and which tests needed a second try."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.house.tree import ROOT

FLAKY = (
    "def test_at_once():\n    pass\n\n\ndef test_at_the_second_try():\n    path = "
    '__import__("pathlib").Path({mark!r})\n'
)
FLAKY += "    there = path.exists()\n    path.touch()\n    assert there\n"


def run_tier(folder: Path, name: str, *args: str) -> int:
    """One tier of one file, as the Makefile runs it."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        folder,
        folder,
        f"--junitxml={folder}/{name}.xml",
    ]
    command += ["-o", f"cache_dir={folder}/cache", *args]
    # to load all plugins takes five times as long
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [str(word) for word in command], env=bare, capture_output=True, check=False
    ).returncode


def summarise(folder: Path, *tiers: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / ".ci" / "summary.py"), *tiers]
    done = subprocess.run(
        command,
        env={**os.environ, "KDIST_TIERS": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_a_test_that_passes_when_tried_again_has_passed_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FLAKY.format(mark=str(tmp_path / "mark")))
    assert run_tier(tmp_path, "tier") == 1
    assert (
        run_tier(tmp_path, "tier.again", "--last-failed", "--last-failed-no-failures", "none") == 0
    )
    code, lines = summarise(tmp_path, "tier")
    assert lines[1].split()[:4] == ["tier", "2", "0", "0"]
    assert lines[2:] == [
        "tier: passed at the second try only: test_it::test_at_the_second_try",
        "2 passed, 0 failed, 0 skipped",
    ]
    assert code == 0


def test_what_fails_twice_or_did_not_run_fails_the_whole(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_well():\n    pass\n\n\ndef test_never():\n    assert False\n"
    )
    assert run_tier(tmp_path, "tier") == 1
    assert run_tier(tmp_path, "tier.again", "--last-failed") == 1
    code, lines = summarise(tmp_path, "tier", "other")
    assert lines[1].split()[:4] == ["tier", "1", "1", "0"]
    assert lines[2:] == [
        "tier: 1 passed, 1 failed",
        "other did not run, or left an unreadable report",
        "1 passed, 1 failed, 0 skipped",
    ]
    assert code == 1

"""Logs of a run on this machine have a limit, and whoever follows one misses nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdist.events import LogTail

LINES = 40_000
PRINTS = f"""
for number in range({LINES}):
    print(f"line {{number}} " + 80 * "x")
print("the last line")
"""


@pytest.mark.sampled
@pytest.mark.processes
def test_a_script_that_prints_without_end_fills_no_disk(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    kdist = str(Path(sys.executable).with_name("kdist"))
    environment = {
        **os.environ,
        "KDIST_HOME": str(tmp_path / ".kdist"),
        "KDIST_LOG_LIMIT": "1Mi",
    }
    done = subprocess.run(
        [kdist, "run", "train.py"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (log,) = (tmp_path / ".kdist").glob("*/node-0/log")
    sizes = [path.stat().st_size for path in (log, log.with_name("log.1"))]
    assert all(size < 3 << 20 for size in sizes), "a limit, and what came in one piece"
    assert sum(sizes) < LINES * 80
    assert "the last line" in done.stderr
    assert log.read_text().partition("\n")[0].count("KDIST_LOG_LIMIT") == 1, "it says so"
    shown = subprocess.run(
        [kdist, "logs", log.parent.parent.name],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "the last line" in shown.stdout
    assert "line 0 " not in shown.stdout


def test_a_log_is_followed_into_the_file_that_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    tail = LogTail("node-0", path, from_start=True)

    def read() -> list[str]:
        return [entry.body for entry in tail.read()]

    assert read() == ["one"]
    with path.open("a") as log:
        log.write("two\n")
    path.replace(tmp_path / "log.1")
    path.write_text("three\n")
    assert read() == ["two", "three"]
    assert [entry.body for entry in LogTail("node-0", path, from_start=True).read()] == [
        "one",
        "two",
        "three",
    ]
    assert list(LogTail("node-0", path).read()) == []
    assert json.dumps(read()) == "[]"

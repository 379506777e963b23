"""Logs of a run on this machine have a limit, and whoever follows one misses nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kdist.events import LogTail
from tests.cli.running import Start, write_script
from tests.process_usage import count

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


FLOOD = """
import sys
piece = "".join(f"line {number} " + 190 * "x" + "\\n" for number in range(5_000))
for megabyte in range(int(sys.argv[1])):
    sys.stdout.write(piece)
    sys.stdout.flush()
    with open("printed", "a") as file:
        file.write(".")
"""
"""Prints so many megabytes, and notes each in a file."""
LIMIT, LIMIT_BYTES = "4Mi", 4 << 20
GROWTH_KIB = 16 << 10


@pytest.mark.processes
@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "megabytes",
    [pytest.param(100, marks=pytest.mark.sampled), pytest.param(10_000, marks=pytest.mark.wide)],
)
def test_a_script_that_prints_gigabytes_fills_neither_disk_nor_memory(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    monkeypatch.setenv("KDIST_LOG_LIMIT", LIMIT)
    run = start(write_script(tmp_path, FLOOD), str(megabytes))
    printed = tmp_path / "printed"
    few: dict[str, int] = {}
    most: dict[str, int] = {}
    largest = 0
    while run.process.poll() is None:
        for folder in (tmp_path / "runs").glob("*/node-0"):
            held = {"kdist run": run.process.pid, "agent": pid_of_agent(folder)}
            for name, pid in held.items():
                with suppress(OSError):  # it is ending, or not there yet
                    most[name] = max(most.get(name, 0), count(pid).private_kib)
            for log in folder.glob("log*"):
                with suppress(OSError):
                    largest = max(largest, log.stat().st_size)
            if not few and printed.exists() and printed.stat().st_size >= megabytes / 5:
                few = dict(most)
        time.sleep(0.1)  # between two looks
    run.wait(0)
    assert printed.stat().st_size == megabytes
    sys.stdout.write(f"log {largest} bytes at most; {few} -> {most} KiB\n")
    assert largest < LIMIT_BYTES + (2 << 20), "a limit, and what came in one piece"
    assert few.keys() == {"kdist run", "agent"}
    for name, before in few.items():
        assert most[name] <= before + GROWTH_KIB, name


def pid_of_agent(folder: Path) -> int:
    """0 before it is there."""
    try:
        return int(json.loads((folder / "agent.json").read_text())["pid"])
    except (OSError, ValueError):
        return 0


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

"""Every command that reads the ledger of a run of days stays small, and so does the run's end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Run, Start, write_job

MOST_KIB = 200 << 10
_LINE = (
    b'{"step":%d,"generation":1,"world_size":1,"first":%d,"last":%d,"loss":"0x1.%013xp-2",'
    b'"seconds":0.01,"wait_seconds":0.001}\n'
)


def lengthen(ledger: Path, steps: int) -> None:
    """Put lines of `steps` steps of the first generation before those that are there; a training
    has written such lines.
    """
    path = ledger / "steps.jsonl"
    own = path.read_bytes()
    with path.open("wb") as file:
        for begin in range(1, steps + 1, 10_000):
            numbers = range(begin, min(begin + 10_000, steps + 1))
            file.write(b"".join(_LINE % (n, n * 32, n * 32 + 31, n) for n in numbers))
        file.write(own)


# What a process held before it became another program counts as well: so a small one starts it.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[2:], check=False).returncode
with open(sys.argv[1], "w") as file:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_maxrss, round(used.ru_utime + used.ru_stime), file=file)
sys.exit(code)
"""


def ask(home: Path, *arguments: str) -> tuple[str, int]:
    """What a command prints, and the most memory that it held, in KiB."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, "peak", sys.executable, "-m", *arguments],
        cwd=home,
        env={**os.environ, "KDIST_HOME": str(home / "runs"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    peak, cpu = map(int, (home / "peak").read_text().split())
    sys.stdout.write(f"{arguments[:3]}: {peak >> 10} MiB, {cpu} s of a core\n")
    assert done.returncode in (0, 3), done.stderr
    return done.stdout, peak


def wait_small(run: Run, code: int) -> None:
    """Wait for the end of `kdist run` while looking at how much it has held at most."""
    peak = 0
    status = Path(f"/proc/{run.process.pid}/status")
    while run.process.poll() is None:
        found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        peak = max([peak, *(int(line.split()[1]) for line in found)])
        time.sleep(0.02)
    run.wait(code)
    sys.stdout.write(f"kdist run: {peak >> 10} MiB\n")
    assert 0 < peak < MOST_KIB


@pytest.mark.processes
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(200_000, marks=[pytest.mark.chaos, pytest.mark.sampled]),
        pytest.param(3_000_000, marks=[pytest.mark.chaos, pytest.mark.wide]),
    ],
)
def test_a_run_of_very_many_steps_is_read_within_bounded_memory(
    start: Start, tmp_path: Path, steps: int
) -> None:
    run = start(write_job(tmp_path, nodes=1, steps=4, checkpoint=2))
    run.wait(0)
    folder = run.folder("digits")
    lengthen(folder / "checkpoints" / "ledger", steps)
    (folder / "report.json").unlink()  # as of a run that was killed
    for arguments in (
        ("kdist", "status", "digits", "--local"),
        ("kdist", "report", "digits", "--local"),
        ("kdist", "report", "digits", "--local", "-o", "html", "--out", "page.html"),
        ("kdist_trainer.checkpoint", "records", str(folder / "checkpoints"), "--out", "copy"),
    ):
        assert ask(tmp_path, *arguments)[1] < MOST_KIB
    out, peak = ask(tmp_path, "kdist", "report", "digits", "--local", "-o", "json")
    report: dict[str, Any] = json.loads(out)
    assert peak < MOST_KIB
    assert report["steps"]["reached"] == steps
    assert report["productiveSeconds"] == pytest.approx(steps * 0.01, rel=0.001)
    assert len(report["lossCurve"]) <= 700
    out, peak = ask(tmp_path, "kdist_trainer.checkpoint", "ledger", str(folder / "checkpoints"))
    assert peak < MOST_KIB
    assert count(json.loads(out)["steps"]) == steps + 4
    copied = tmp_path / "copy" / "ledger" / "steps.jsonl"
    assert copied.stat().st_size == (folder / "checkpoints/ledger/steps.jsonl").stat().st_size
    run = start(write_job(tmp_path, nodes=1, steps=8, checkpoint=4))
    wait_small(run, 0)
    assert [line["step"] for line in newest(folder)] == [5, 6, 7, 8], "it went on where it was"
    shutil.rmtree(tmp_path / "runs")
    copied.unlink()


def count(records: Sequence[dict[str, Any]]) -> int:
    return sum(record.get("steps", 1) for record in records)


def newest(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "checkpoints/ledger/steps.jsonl").read_bytes()[-4096:].splitlines()
    return [json.loads(line) for line in lines[-4:]]

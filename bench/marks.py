"""A launcher and its ranks as the measurements of recovery see them: each rank notes every step
that it has finished in one file, and the launcher ends with the measurement.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml


class Mark(NamedTuple):
    """A rank has finished a step; `generation` is 0 under torchrun."""

    pid: int
    rank: int
    step: int
    time: float
    generation: int


def read(marks: Path) -> list[Mark]:
    """Every whole line of the file."""
    whole = marks.read_text().rpartition("\n")[0].splitlines()
    fields = (line.split() for line in whole)
    return [
        Mark(int(pid), int(rank), int(step), float(moment), int(generation))
        for pid, rank, step, moment, generation in fields
    ]


def write_job(folder: Path, spec: dict[str, Any]) -> str:
    """Write a job with these fields; returns the path of its file."""
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": {"image": "none", "maxRestarts": 1000, **spec},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return str(folder / "job.yaml")


def environment(folder: Path) -> dict[str, str]:
    """The environment of a launcher whose ranks note their steps in the folder's file `marks`."""
    (folder / "marks").touch()
    root = str(Path(__file__).parents[1])
    return {
        **os.environ,
        "KDIST_BENCH_MARKS": str(folder / "marks"),
        "KDIST_HOME": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }


@contextlib.contextmanager
def running(
    arguments: list[str], env: dict[str, str], output: IO[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a session of its own, all of which ends with the block."""
    folder = Path(output.name).parent
    process = subprocess.Popen(
        arguments, env=env, cwd=folder, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""A job of one rank under `kdist run`, for the parts that need an agent."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.commands import KDIST
from bench.gpu.parts import python_path
from bench.recovery import running

LOG_BYTES = 3000


class Launched(NamedTuple):
    """A running `kdist run`."""

    process: subprocess.Popen[bytes]
    root: Path
    """The run folder."""


@contextlib.contextmanager
def launch_job(
    folder: Path, train: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[Launched]:
    """Run a training of one rank until the end of the block. What the block raises is told with the
    end of the run's log.
    """
    spec = {
        "image": "none",
        "nodes": 1,
        "procsPerNode": 1,
        "maxRestarts": 100,
        "train": dict(train),
    }
    job = {
        "apiVersion": "kdist.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": spec,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    env = {
        **os.environ,
        "KDIST_HOME": str(folder / "runs"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        **(environment or {}),
    }
    command = [*KDIST, "run", str(folder / "job.yaml")]
    log = folder / "log"
    with log.open("w") as output, running(command, env, output) as process:
        try:
            yield Launched(process, folder / "runs" / "bench")
        except RuntimeError as error:
            raise RuntimeError(f"{log.read_text()[-LOG_BYTES:]}\n{error}") from error

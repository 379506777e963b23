"""A job of one rank under `kdist run`, for the parts that need an agent."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench import marks
from bench.commands import KDIST
from bench.gpu.parts import python_path

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
    job = marks.write_job(folder, {"nodes": 1, "procsPerNode": 1, "train": dict(train)})
    env = {**marks.environment(folder), "PYTHONPATH": python_path(), **(environment or {})}
    command = [*KDIST, "run", job]
    log = folder / "log"
    with log.open("w") as output, marks.running(command, env, output) as process:
        try:
            yield Launched(process, folder / "runs" / "bench")
        except RuntimeError as error:
            raise RuntimeError(f"{log.read_text()[-LOG_BYTES:]}\n{error}") from error

"""TensorBoard for a run on this machine: a process of the trainer's that ends with the one that asks for it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdist.errors import KdistError
from kdist.local import looking

_MODULE = "kdist_trainer.tensorboard"
_FOLDER = "tensorboard"


def show(root: Path, port: int, *, tell: Callable[[int], object]) -> None:
    """Show the event files of the run in `root` at this port, 0 for a free one, which `tell` hears; returns when it ends.

    Raises `KdistError` where there is nothing to show, or nothing to show it with.
    """
    events = looking.checkpoints_of(root) / _FOLDER
    command = [sys.executable, "-m", _MODULE, str(events), "--port", str(port)]
    # Its standard input is a pipe whose other end goes when this process goes, however that may be.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            tell(_read_port(process, events))
            process.wait()
        finally:
            process.terminate()


def _read_port(process: subprocess.Popen[bytes], events: Path) -> int:
    try:
        said: Any = json.loads(process.stdout.readline() if process.stdout else b"")
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("port"), int):
        return int(said["port"])
    problem = said.get("problem") if isinstance(said, dict) else "TensorBoard does not start"
    raise KdistError(str(problem), next_command=f"tensorboard --logdir {shlex.quote(str(events))}")

"""The trainer's tools for a run on this machine, each in a process of its own, because the command
line never imports the trainer: checkpoints, export of weights, profiles, and TensorBoard.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdist.errors import KdistError
from kdist.jobs.profile import MODULE, Ask
from kdist.local import agents, run_dir


def checkpoints_of(root: Path) -> Path:
    """Where the run in this run folder keeps its checkpoints; a folder that is no run folder is
    taken for the checkpoints.
    """
    run = run_dir.read_json(root / "run.json")
    return Path(str(run["checkpoints"])) if run and run.get("checkpoints") else root


def run_trainer_tool(checkpoints: Path, question: str, *arguments: str) -> dict[str, Any]:
    """The answer of `python -m kdist_trainer.checkpoint`. Raises `KdistError` when the disk does
    not answer.
    """
    return _ask(
        checkpoints, question, arguments, refused=f"the checkpoints in {checkpoints} cannot be read"
    )


def export(checkpoints: Path, file: Path, *arguments: str) -> dict[str, Any]:
    """Let the trainer write the weights to `file`, and say what it holds. Raises `KdistError`."""
    refused = "the weights cannot be exported"
    return _ask(checkpoints, "export", (*arguments, "--out", str(file)), refused=refused)


def _ask(
    checkpoints: Path, question: str, arguments: Sequence[str], *, refused: str
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "kdist_trainer.checkpoint",
        question,
        str(checkpoints),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        document: Any = json.loads(done.stdout)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        hint = (
            "pip install 'kdist[local]' brings torch"
            if "No module named 'torch'" in said[0]
            else ""
        )
        raise KdistError(f"{refused}: {said[0]}", hint=hint)
    return document


def local_agents(root: Path) -> list[Ask]:
    """The agents that are at work. Raises `KdistError` if there are none."""
    nodes = [root / node for node in agents.ports(root)]
    if not nodes:
        raise KdistError(f"no agent of {root} is at work yet", hint="try again in a second")
    return [_beside(node, checkpoints_of(root)) for node in nodes]


def _beside(scratch: Path, checkpoints: Path) -> Ask:
    def ask(words: Sequence[str]) -> bytes:
        command = [
            sys.executable,
            "-m",
            MODULE,
            *words,
            "--scratch",
            str(scratch),
            "--root",
            str(checkpoints),
        ]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
                f"exit code {done.returncode}"
            ]
            raise KdistError(f"the profile of {scratch.parent}: {said[0]}")
        return done.stdout

    return ask


_MODULE = "kdist_trainer.tensorboard"
_FOLDER = "tensorboard"


def show(root: Path, port: int, *, tell: Callable[[int], object]) -> None:
    """Show the event files of the run in `root` at this port, 0 for a free one, which `tell` hears;
    returns when it ends.

    Raises `KdistError` where there is nothing to show, or nothing to show it with.
    """
    events = checkpoints_of(root) / _FOLDER
    command = [sys.executable, "-m", _MODULE, str(events), "--port", str(port)]
    # Its standard input is a pipe whose other end goes when this process goes, however that may be.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
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

"""Runs the trainer's tools for a run on this machine, each in a subprocess, because the command
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
from kdist.jobs.kept_logs import choose
from kdist.jobs.profile import MODULE, AgentTool
from kdist.local import agents, run_dir
from kdist.local.launch import install_command


def checkpoints_of(root: Path) -> Path:
    """The checkpoint folder of a run folder; a folder that is no run folder counts as one."""
    run = run_dir.read_json(root / "run.json")
    return Path(str(run["checkpoints"])) if run and run.get("checkpoints") else root


def run_checkpoint_tool(checkpoints: Path, action: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m kdist_trainer.checkpoint ACTION` and return the document that it prints.
    Raises `KdistError` if the checkpoints cannot be read.
    """
    return _run(
        checkpoints, action, arguments, failure=f"the checkpoints in {checkpoints} cannot be read"
    )


def export(checkpoints: Path, file: Path, *arguments: str) -> dict[str, Any]:
    """Write the weights of a checkpoint to `file`, and return a description of its content. Raises
    `KdistError`.
    """
    failure = "the weights cannot be exported"
    return _run(checkpoints, "export", (*arguments, "--out", str(file)), failure=failure)


def fetch_kept_logs(
    job: str, checkpoints: Path, folder: Path, *, generation: int | None
) -> dict[str, Path]:
    """Copy what is kept of each node's log to a file in `folder`, as `kept_logs.fetch` of
    `kdist.jobs` does. Raises `NotFoundError` or `KdistError`.
    """
    failure = f"the logs in {checkpoints} cannot be read"
    wanted, nodes = choose(job, _run(checkpoints, "logs", (), failure=failure), generation)
    found = {}
    for node in nodes:
        found[node] = folder / node
        selection = ("--name", node, "--generation", str(wanted))
        command = [sys.executable, "-m", "kdist_trainer.checkpoint", "logs", str(checkpoints)]
        with found[node].open("wb") as file:
            done = subprocess.run([*command, *selection], stdout=file, check=False)
        if done.returncode != 0:
            raise KdistError(f"{failure}: exit code {done.returncode}")
    return found


def _run(
    checkpoints: Path, action: str, arguments: Sequence[str], *, failure: str
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "kdist_trainer.checkpoint",
        action,
        str(checkpoints),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        document: Any = json.loads(done.stdout)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        hint = (
            f"it needs torch in the environment of kdist: {install_command()}"
            if "No module named 'torch'" in last[0]
            else ""
        )
        raise KdistError(f"{failure}: {last[0]}", hint=hint)
    return document


def local_agents(root: Path) -> list[AgentTool]:
    """The profiling tool of each running agent. Raises `KdistError` if there are none."""
    nodes = [root / node for node in agents.ports(root)]
    if not nodes:
        raise KdistError(f"no agent of {root.name} answers yet", hint="try again in a second")
    return [_profiling_tool(node, checkpoints_of(root)) for node in nodes]


def _profiling_tool(scratch: Path, checkpoints: Path) -> AgentTool:
    def run(arguments: Sequence[str]) -> bytes:
        command = [
            sys.executable,
            "-m",
            MODULE,
            *arguments,
            "--scratch",
            str(scratch),
            "--root",
            str(checkpoints),
        ]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
                f"exit code {done.returncode}"
            ]
            raise KdistError(f"the profile of {scratch.parent}: {last[0]}")
        return done.stdout

    return run


_MODULE = "kdist_trainer.tensorboard"
_FOLDER = "tensorboard"


def run_tensorboard(root: Path, port: int, *, on_ready: Callable[[int], object]) -> None:
    """Run TensorBoard on the event files of a run until it ends.

    Args:
        root: the run folder.
        port: on loopback; 0 for a free one.
        on_ready: receives the port when TensorBoard listens.

    Raises:
        KdistError: there are no event files, or TensorBoard is not installed.
    """
    events = checkpoints_of(root) / _FOLDER
    command = [sys.executable, "-m", _MODULE, str(events), "--port", str(port)]
    # Its standard input is a pipe that closes when this process ends, for whatever reason.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            on_ready(_read_port(process, events))
            process.wait()
        finally:
            process.terminate()


def _read_port(process: subprocess.Popen[bytes], events: Path) -> int:
    try:
        report: Any = json.loads(process.stdout.readline() if process.stdout else b"")
    except ValueError:
        report = None
    if isinstance(report, dict) and isinstance(report.get("port"), int):
        return int(report["port"])
    problem = report.get("problem") if isinstance(report, dict) else "TensorBoard does not start"
    raise KdistError(str(problem), next_command=f"tensorboard --logdir {shlex.quote(str(events))}")

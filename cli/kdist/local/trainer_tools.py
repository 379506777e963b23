"""Runs the trainer's tools for a run on this machine, each in a subprocess, because the command
line never imports the trainer: checkpoints, export of weights, profiles, and TensorBoard.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdist.errors import KdistError
from kdist.jobs.logs import choose
from kdist.jobs.profile import MODULE, AgentTool
from kdist.local import agents
from kdist.local.launch import install_command
from kdist.local.location import CheckpointLocation, folder_of, location_of
from kdist.local.run_dir import open_private
from kdist_trainer.untrusted_text import MalformedTextError, parse_json


def run_checkpoint_tool(
    checkpoints: CheckpointLocation, action: str, *arguments: str
) -> dict[str, Any]:
    """Run `python -m kdist_trainer.checkpoint ACTION` and return the document that it prints.
    Raises `KdistError` if the checkpoints cannot be read.
    """
    failure = f"the checkpoints in {checkpoints.text} cannot be read"
    return _run(checkpoints, action, arguments, failure=failure)


def copy_records(bucket: CheckpointLocation, folder: Path) -> None:
    """Copy the ledger and DONE of a run from its bucket to a folder. Raises `KdistError`."""
    _run(
        bucket,
        "records",
        ("--out", str(folder)),
        failure=f"the bucket {bucket.text} cannot be read",
    )


def refresh_records(root: Path) -> Path:
    """The folder with the ledger of a run folder, copied from its bucket now if it has one. Raises
    `KdistError`.
    """
    location, folder = location_of(root), folder_of(root)
    if location.is_bucket:
        copy_records(location, folder)
    return folder


def archive_bucket(bucket: CheckpointLocation) -> str | None:
    """Rename what is in a run's folder of a bucket; returns the new URL, None if nothing is there.
    Raises `KdistError`.
    """
    failure = f"the checkpoints in {bucket.text} cannot be renamed"
    moved = _run(bucket, "aside", (), failure=failure)["moved"]
    return None if moved is None else str(moved)


def export(checkpoints: CheckpointLocation, file: Path, *arguments: str) -> dict[str, Any]:
    """Write the weights of a checkpoint to `file`, and return a description of its content. Raises
    `KdistError`.
    """
    failure = "the weights cannot be exported"
    return _run(checkpoints, "export", (*arguments, "--out", str(file)), failure=failure)


def fetch_kept_logs(
    job: str, checkpoints: CheckpointLocation, folder: Path, *, generation: int | None
) -> dict[str, Path]:
    """Copy what is kept of each node's log to a file in `folder`, as `logs.fetch` of
    `kdist.jobs` does. Raises `NotFoundError` or `KdistError`.
    """
    failure = f"the logs in {checkpoints.text} cannot be read"
    wanted, nodes = choose(job, _run(checkpoints, "logs", (), failure=failure), generation)
    found = {}
    for node in nodes:
        found[node] = folder / node
        selection = ("--name", node, "--generation", str(wanted))
        command = [sys.executable, "-m", "kdist_trainer.checkpoint", "logs", checkpoints.text]
        with open_private(found[node], "wb") as file:
            done = subprocess.run(
                [*command, *selection],
                stdout=file,
                check=False,
                env={**os.environ, **checkpoints.variables},
            )
        if done.returncode != 0:
            raise KdistError(f"{failure}: exit code {done.returncode}")
    return found


def _run(
    checkpoints: CheckpointLocation, action: str, arguments: Sequence[str], *, failure: str
) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "kdist_trainer.checkpoint",
        action,
        checkpoints.text,
        *arguments,
    ]
    environment = {**os.environ, **checkpoints.variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        document: Any = parse_json(done.stdout, allow_nan=True)
    except MalformedTextError:
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
    place = [] if location_of(root).is_bucket else ["--root", str(folder_of(root))]
    return [_profiling_tool(node, place) for node in nodes]


def _profiling_tool(scratch: Path, place: Sequence[str]) -> AgentTool:
    def run(arguments: Sequence[str]) -> bytes:
        command = [
            sys.executable,
            "-m",
            MODULE,
            *arguments,
            "--scratch",
            str(scratch),
            *place,
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
    location = location_of(root)
    events = f"{location.text}/{_FOLDER}"
    command = [sys.executable, "-m", _MODULE, events, "--port", str(port)]
    # Its standard input is a pipe that closes when this process ends, for whatever reason.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **location.variables},
    ) as process:
        try:
            on_ready(_read_port(process, events, is_bucket=location.is_bucket))
            process.wait()
        finally:
            process.terminate()


def _read_port(process: subprocess.Popen[bytes], events: str, *, is_bucket: bool) -> int:
    try:
        report: Any = parse_json(process.stdout.readline() if process.stdout else b"")
    except MalformedTextError:
        report = None
    if isinstance(report, dict) and isinstance(report.get("port"), int):
        return int(report["port"])
    problem = report.get("problem") if isinstance(report, dict) else "TensorBoard does not start"
    command = "" if is_bucket else f"tensorboard --logdir {shlex.quote(events)}"
    raise KdistError(str(problem), next_command=command)

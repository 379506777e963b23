"""Runs the trainer's tools for a run on this machine, each in a subprocess, because the command
line never imports the trainer: checkpoints, kept logs, and export of weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdist.errors import KdistError
from kdist.job.cluster.logs import choose
from kdist.job.local.launch import install_command
from kdist.job.local.run_dir import CheckpointLocation, folder_of, location_of, open_private
from kdist_trainer.formats.untrusted_text import MalformedTextError, parse_object


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
    failure = f"the bucket {bucket.text} cannot be read"
    _run(bucket, "records", ("--out", str(folder)), failure=failure)


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
    `kdist.job.cluster` does. Raises `NotFoundError` or `KdistError`.
    """
    failure = f"the logs in {checkpoints.text} cannot be read"
    wanted, nodes = choose(job, _run(checkpoints, "logs", (), failure=failure), generation)
    found = {}
    for node in nodes:
        found[node] = folder / node
        selection = ("--name", node, "--generation", str(wanted))
        with open_private(found[node], "wb") as file:
            done = _start(checkpoints, "logs", selection, stdout=file)
        if done.returncode != 0:
            raise KdistError(f"{failure}: exit code {done.returncode}")
    return found


def _start(
    checkpoints: CheckpointLocation, action: str, arguments: Sequence[str], **output: Any
) -> subprocess.CompletedProcess[str]:
    tool = [sys.executable, "-m", "kdist_trainer.checkpoint", action, checkpoints.text]
    environment = {**os.environ, **checkpoints.variables}
    return subprocess.run([*tool, *arguments], text=True, check=False, env=environment, **output)


def _run(
    checkpoints: CheckpointLocation, action: str, arguments: Sequence[str], *, failure: str
) -> dict[str, Any]:
    done = _start(checkpoints, action, arguments, capture_output=True)
    try:
        return parse_object(done.stdout, allow_nan=True)
    except MalformedTextError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        hint = (
            f"it needs torch in the environment of kdist: {install_command()}"
            if "No module named 'torch'" in last[0]
            else ""
        )
        raise KdistError(f"{failure}: {last[0]}", hint=hint) from None

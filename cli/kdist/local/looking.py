"""The trainer's own look at a folder of checkpoints on this machine, by a process: the command line never imports the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdist.errors import KdistError
from kdist.local import folder


def checkpoints_of(root: Path) -> Path:
    """Where the run in this run folder keeps its checkpoints; a folder that is no run folder is taken for the checkpoints."""
    run = folder.read_json(root / "run.json")
    return Path(str(run["checkpoints"])) if run and run.get("checkpoints") else root


def look(checkpoints: Path, question: str, *arguments: str) -> dict[str, Any]:
    """The answer of `python -m kdist_trainer.checkpoint`. Raises `KdistError` when the disk does not answer."""
    return _ask(checkpoints, question, arguments, refused=f"the checkpoints in {checkpoints} cannot be read")


def export(checkpoints: Path, file: Path, *arguments: str) -> dict[str, Any]:
    """Let the trainer write the weights to `file`, and say what it holds. Raises `KdistError`."""
    refused = "the weights cannot be exported"
    return _ask(checkpoints, "export", (*arguments, "--out", str(file)), refused=refused)


def _ask(checkpoints: Path, question: str, arguments: Sequence[str], *, refused: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kdist_trainer.checkpoint", question, str(checkpoints), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        document: Any = json.loads(done.stdout)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        hint = "pip install 'kdist[local]' brings torch" if "No module named 'torch'" in said[0] else ""
        raise KdistError(f"{refused}: {said[0]}", hint=hint)
    return document

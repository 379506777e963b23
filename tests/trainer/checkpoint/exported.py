"""What a run's last checkpoint holds, as whoever exports it gets it: hashed by what the file says,
not by kdist.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kdist_trainer.checkpoint import export


def digest_of_export(root: Path, *, step: int | None = None, average: bool = False) -> str:
    """SHA-256 of all tensors of the exported file, in the order of their names; with `average` of
    the moving average.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        export.write_file(export.prepare(root, step=step, average=average), path)
        with safe_open(path, framework="pt", device="cpu") as file:
            return digest_of({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping


def digest_of(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode())
        sha.update(state[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def assert_done_tells_what_is_kept(root: Path, done: dict[str, Any]) -> None:
    """The weights that a managed training's DONE names, if any, are those of the checkpoint that it
    ended with.
    """
    if done.get("weights") is not None and "script" not in done["job"]:
        assert digest_of_export(root, step=done["step"]) == done["weights"], (
            "DONE is about another model than the checkpoint"
        )


def assert_each_done_tells_what_is_kept(folder: Path) -> None:
    """The same of every run below a folder."""
    for path in folder.rglob("checkpoints/DONE"):
        assert_done_tells_what_is_kept(path.parent, json.loads(path.read_bytes()))

"""The GPUs of this node: whether those that the job asks for are there, and what its ranks run on.

The agent counts without initializing CUDA, which the ranks that it forks could not use then.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Final

import torch

from kdist_trainer.config import Exit, Training
from kdist_trainer.errors import DeviceFaultError

CPU: Final = "CPU"
_DEVICES = Path("/dev")
_DRIVER = Path("/proc/driver/nvidia")


def count_gpus() -> int:
    """The GPUs that torch sees on this node."""
    return torch.cuda.device_count()


def require_gpus(wanted: int, *, node: str, is_only_machine: bool = False) -> None:
    """Raise `DeviceFaultError` if this node has fewer GPUs than the job asks for. The error is
    final if the job runs on this machine alone.
    """
    found = count_gpus() if wanted else 0
    if found < wanted:
        error = DeviceFaultError(describe_missing(wanted, found, node=node))
        if is_only_machine:
            error.code = Exit.CONFIG
        raise error


def describe_missing(wanted: int, found: int, *, node: str) -> str:
    """What is missing on this node of the GPUs that the job asks for, and what torch sees."""
    of = f"{wanted} GPU{'s' * (wanted != 1)}"
    seen = "none" if not found else f"only {found}"
    return f"the job asks for {of} on node {node}, and torch sees {seen}: {'; '.join(_reasons())}"


def _reasons() -> list[str]:
    """What is known of this node's GPUs, the likely reason first."""
    found = []
    if torch.version.cuda is None and torch.version.hip is None:
        found.append(f"torch {torch.__version__} is built without CUDA, so the image needs another")
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        found.append(f"CUDA_VISIBLE_DEVICES is {chosen!r}")
    files = [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    found.append(
        f"{len(files)} of its device files /dev/nvidia* are here"
        if files
        else "there are no device files /dev/nvidia*: the node has no driver, or its container "
        "runtime hands no GPU over"
    )
    try:
        version = (_DRIVER / "version").read_text(errors="replace").partition("\n")[0]
    except OSError:
        pass
    else:
        found.append(version[:200])
    return found


def describe_devices(ranks: int, train: Training | None) -> str:
    """What the ranks of this node run on, such as `8 x NVIDIA H100 80GB HBM3`.

    Args:
        ranks: Their number.
        train: The settings of kdist's loop, whose ranks take a GPU each, all of them, or the CPU;
            None for a script, which may use the GPUs that are named.
    """
    found = count_gpus()
    if found == 0 or (train is not None and ranks > found):
        return CPU
    used = found if train is None or train.strategy == "data_parallel" else ranks
    return f"{used} x {_find_model()}"


def _find_model() -> str:
    """The name of most GPUs of this machine."""
    names: Counter[str] = Counter()
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        try:
            found = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if found:
            names[found[1].strip()[:64]] += 1
    return names.most_common(1)[0][0] if names else "GPU"

"""What the figures were taken on: device, driver and versions, but not the commit: a run that is
continued after a change to one part keeps the figures of the others.

In a process of its own, since asking torch for a device's name takes memory on the device until the
process ends.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import version as version_of

import torch

from bench.gpu.parts import Order


def measure(order: Order) -> dict[str, str]:
    """Facts by name. Raises `RuntimeError` if there is no such device."""
    facts = {
        "device": "CPU, in miniature",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kdist": version_of("kdist-trainer"),
        "host": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    if order.device == "cpu":
        return facts
    if not torch.cuda.is_available():
        raise RuntimeError(
            "torch finds no GPU: check nvidia-smi and that torch is built with CUDA "
            f"(torch.version.cuda is {torch.version.cuda}); --device cpu runs it in miniature"
        )
    about = torch.cuda.get_device_properties(0)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return facts | {
        "device": torch.cuda.get_device_name(0),
        "memory": f"{about.total_memory / 2**30:.1f} GiB",
        "capability": f"{about.major}.{about.minor}",
        "driver": driver(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(cudnn),
        "nccl": ".".join(map(str, nccl)),
    }


def driver() -> str:
    """The driver's version; `unknown` without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (ask(command).splitlines() or ["unknown"])[0]


def ask(command: Sequence[str]) -> str:
    """What a command prints; empty if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""

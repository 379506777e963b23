"""The health check of a node, before it joins a worker group: the job's own command, or for nodes
with GPUs matrix products for some time, `python -m kdist_trainer.distributed.health_check`. A node
that fails it does not join.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kdist_trainer.causes import BY_NAME
from kdist_trainer.config import Cause, Preflight
from kdist_trainer.errors import ConfigError, DeviceFaultError, NodeFaultError, find
from kdist_trainer.processes import process_tree
from kdist_trainer.processes.descriptors import EXHAUSTED

_SECONDS: Final = 1.0
_SIZE: Final = 4096
_TAIL: Final = 2000  # bytes of the output's end
_LINES: Final = 5
_SCARCE: Final = {errno.EAGAIN, errno.ENOMEM, *EXHAUSTED}
_NOT_RUN: Final = (126, 127)  # what a shell says of a command that is missing or no program


def check_node(preflight: Preflight | None, *, node: str, gpus: int, code: Path | None) -> None:
    """Run the health check of this node, if it has one: `gpus` that the job asks for, or the job's
    command in its folder `code`.

    Raises:
        NodeFaultError: It has failed or takes too long; has its last lines.
        ConfigError: The job's command cannot be run.
    """
    preflight = preflight or Preflight()
    command = preflight.command
    if command is None and gpus:
        command = [sys.executable, "-P", "-m", __name__]
    if command is None:
        return
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=code,
                start_new_session=True,
            )
        except OSError as error:
            if preflight.command is None or error.errno in _SCARCE:
                what = f"the health check of node {node} cannot be started: {error}"
                raise NodeFaultError(what) from error
            raise ConfigError(f"spec.preflight.command cannot be run: {error}") from error
        how = f"took longer than {preflight.timeout_seconds} s"
        try:
            with suppress(subprocess.TimeoutExpired):
                how = f"ended with exit code {process.wait(preflight.timeout_seconds)}"
        finally:
            if process.poll() is None:  # one that waits in a driver may not die: no longer wait
                process_tree.kill(below=[process.pid])
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
        lines = output.read().decode(errors="replace").splitlines()
    if process.returncode == 0:
        return
    told = " | ".join(line.strip() for line in lines[-_LINES:] if line.strip())
    told = f"the health check of node {node} {how}{told and f': {told}'}"
    if preflight.command is not None and process.returncode in _NOT_RUN:
        raise ConfigError(f"spec.preflight.command cannot be run: {told}")
    raise NodeFaultError(told)


def multiply(devices: Sequence[str], *, seconds: float = _SECONDS, size: int = _SIZE) -> int:
    """Compute the same matrix product on all devices again and again; returns how often. Raises
    `DeviceFaultError` if one of them computes another result than before.
    """
    import torch

    matrices = [torch.rand(size, size, device=device) for device in devices]
    expected = [matrix @ matrix for matrix in matrices]
    deadline, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < deadline or not rounds:
        found = [matrix @ matrix for matrix in matrices]  # all devices at the same time
        for device, one, other in zip(devices, found, expected, strict=True):
            if not torch.equal(one, other):
                raise DeviceFaultError(
                    f"{device} returns different results for the same matrix product"
                )
        rounds += 1
    return rounds


def main() -> None:
    """Check all GPUs of this node."""
    from torch.cuda import device_count

    try:
        multiply([f"cuda:{index}" for index in range(device_count())])
    except RuntimeError as error:
        found = find(error)
        row = BY_NAME.get(found.signature)
        # anything else may be the image's, or another process's: the ranks meet and report it
        if found.cause is Cause.DEVICE or (row is not None and row.of_machine):
            raise


if __name__ == "__main__":
    main()

"""The weights of a job in the cluster, brought to this machine: a small pod verifies and reads them, and they come as it writes.

Not in a pod that trains: reading weights needs torch and some memory, and a training may have none to spare.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from kdist.errors import KdistError
from kdist.steer import inspect
from kdist.steer.target import Target
from kdist.steer.waiting import Tell

_MEMORY = "1536Mi"
_SECONDS = 6 * 3600
_IDLE = ["python", "-c", f"import time; time.sleep({_SECONDS})"]


def export(target: Target, file: Path, *arguments: str, tell: Tell) -> dict[str, Any]:
    """Write the weights to `file`, whole or not at all, and say what it holds. Raises `KdistError`.

    `arguments` are those of `python -m kdist_trainer.checkpoint export`.
    """
    inspect.check_there_are(target)
    running = next((pod.node for pod in target.pods() if pod.running and not pod.deleting), "")
    tell("a small pod reads its checkpoints")
    # Beside a pod that runs, because not every volume can be mounted on a second node.
    with inspect.looking(target, _IDLE, memory=_MEMORY, seconds=_SECONDS, node=running) as pod:
        if inspect.wait_for(target, pod, ("Running", "Succeeded", "Failed")) != "Running":
            again = f"kubectl describe pod {pod} -n {target.namespace}"
            raise KdistError(f"pod {pod} ended before it was asked", next_command=again)
        command = ["python", "-m", inspect.MODULE, "export", target.checkpoints, *arguments, "--out", "-"]
        return _receive(target, pod, command, file)


def _receive(target: Target, pod: str, command: list[str], file: Path) -> dict[str, Any]:
    temporary = file.with_name(f"{file.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as stream:
            document = _run(target, pod, command, stream)
        temporary.replace(file)
    except OSError as error:
        raise KdistError(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return {"file": str(file), **document}


def _run(target: Target, pod: str, command: list[str], stream: BinaryIO) -> dict[str, Any]:
    """Run the command, its output into `stream`, and compare what came with what it says it sent."""
    import hashlib

    sha, said = hashlib.sha256(), bytearray()

    def take(data: bytes) -> None:
        sha.update(data)
        stream.write(data)

    code = target.cluster.exec(pod, command, container="viewer", out=take, err=said.extend)
    lines = said.decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
    if code != 0:
        raise KdistError(f"{target.name}: {lines[-1][:400]}")
    try:
        document: Any = json.loads(lines[-1])
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("sha256") != sha.hexdigest():
        raise KdistError(f"the weights did not come whole from pod {pod}", hint="try again")
    return document

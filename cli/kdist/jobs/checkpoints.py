"""The checkpoints of a job in the cluster: listed, verified, and exported to this machine as a file
of weights. `checkpoint_rows` shows which checkpoint is LATEST, which one a training would resume
from, and which are damaged.

The trainer's tool runs in a running pod of the job, or else in a helper pod. An export always uses
a helper pod, because reading weights needs torch and memory that a training may not have to spare.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from kdist.errors import Code, KdistError
from kdist.jobs.helper_pod import CONTAINER, TOOL_TIMEOUT, helper_pod, idle_pod, wait_for_phase
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Notify
from kdist.units import age, number, size
from kdist_trainer.untrusted_text import MalformedTextError, parse_json

HEADER = ("STEP", "NAME", "AGE", "SIZE", "RANKS", "SAMPLES", "STATE", "")


def checkpoint_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per checkpoint of a listing, newest first."""
    return [_row(entry, document) for entry in entries(document)]


def entries(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The checkpoints in a listing."""
    found = document.get("checkpoints")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def rejected(document: Mapping[str, Any], state: str) -> list[str]:
    """Names of committed checkpoints that are `damaged`, `unreadable` (whole, but no training can
    read them), or `unsupported` (of a newer version).
    """
    return [
        str(one.get("name"))
        for one in entries(document)
        if one.get("state") == state and one.get("problem")
    ]


def _row(entry: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, ...]:
    state = str(entry.get("state"))
    problem = entry.get("problem")
    written, now = entry.get("time"), document.get("time")
    since = (
        age(max(0.0, now - written))
        if isinstance(written, int | float) and isinstance(now, int | float)
        else "-"
    )
    return (
        _shown(entry.get("step")),
        str(entry.get("name")),
        since,
        "-" if entry.get("bytes") is None else size(entry["bytes"]),
        _shown(entry.get("worldSize")),
        _shown(entry.get("samplesSeen")),
        f"{state}: {problem}" if problem else state,
        " ".join(_marks(entry, document)),
    )


def _marks(entry: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    if entry.get("name") == document.get("latest"):
        yield "LATEST"
    if entry.get("name") == document.get("resumesFrom"):
        yield "<- resumes here"


def _shown(value: object) -> str:
    return "-" if value is None else number(value)


MODULE = "kdist_trainer.checkpoint"


def run_tool(target: ClusterJob, action: str, *arguments: str, notify: Notify) -> dict[str, Any]:
    """Run the trainer's checkpoint tool on the job's checkpoints.

    Args:
        target: the job.
        action: `list`, `verify`, `ledger` or `aside`, which archives the checkpoints.
        *arguments: further arguments of the tool.
        notify: receives a message if a helper pod is needed.

    Returns:
        The document that the tool prints.

    Raises:
        KdistError: the job has no checkpoints, or the tool cannot run.
    """
    check_has_checkpoints(target)
    command = ["python", "-m", MODULE, action, target.checkpoints, *arguments]
    running = next((pod for pod in target.pods() if pod.running and not pod.deleting), None)
    if running is not None and action != "aside":
        code, output = target.cluster.run(
            running.name, command, container=running.container, timeout=TOOL_TIMEOUT
        )
        return read_answer(output.decode(errors="replace"), code, running.name)
    notify(f"no pod of {target.name} runs: starting a helper pod")
    return _run_in_helper_pod(target, command, read_only=action != "aside")


def has_checkpoints(target: ClusterJob) -> bool:
    """Whether the job keeps checkpoints in the cluster."""
    spec = target.job.spec.checkpoints
    return spec is not None and spec.in_cluster


def check_has_checkpoints(target: ClusterJob) -> None:
    """Raises `KdistError` for a job that keeps no checkpoints in the cluster."""
    if not has_checkpoints(target):
        raise KdistError(
            f"{target.name} has no checkpoints in the cluster",
            next_command="kdist explain spec.checkpoints",
        )


def _run_in_helper_pod(
    target: ClusterJob, command: Sequence[str], *, read_only: bool
) -> dict[str, Any]:
    with helper_pod(target, command, read_only=read_only) as name:
        phase = wait_for_phase(target, name, ("Succeeded", "Failed"))
        # the answer is the last document of the log, whatever the image prints before it
        output = "\n".join(deque(target.cluster.logs(name, container=CONTAINER), _LAST_LINES))
        return read_answer(output, 0 if phase == "Succeeded" else 1, name)


def read_answer(output: str, code: int, pod: str) -> dict[str, Any]:
    """The JSON document in the tool's output. `verify` prints one although it exits with 1."""
    for line in reversed(output.split("\n")):
        try:
            found = parse_json(line, allow_nan=True)
        except MalformedTextError:
            continue
        if isinstance(found, dict):
            return found
    last = output.strip().splitlines()[-1:] or [f"exit code {code}"]
    raise KdistError(f"pod {pod} could not read the checkpoints: {last[0][:300]}", code=Code.ERROR)


_LAST_LINES = 100
_EXPORT_MEMORY = "1536Mi"


def export(target: ClusterJob, file: Path, *arguments: str, notify: Notify) -> dict[str, Any]:
    """Write the weights of a checkpoint to a file, completely or not at all.

    Args:
        target: the job.
        file: the file.
        *arguments: of `python -m kdist_trainer.checkpoint export`.
        notify: receives a message about the helper pod.

    Returns:
        A description of the file's content.

    Raises:
        KdistError: the weights cannot be read or written.
    """
    check_has_checkpoints(target)
    running = next((pod.node for pod in target.pods() if pod.running and not pod.deleting), "")
    notify("starting a helper pod to read the checkpoints")
    # On the node of a running pod, because not every volume can be mounted on a second node.
    with idle_pod(target, memory=_EXPORT_MEMORY, node=running) as pod:
        command = ["python", "-m", MODULE, "export", target.checkpoints, *arguments, "--out", "-"]
        return _receive(target, pod, command, file)


def _receive(target: ClusterJob, pod: str, command: list[str], file: Path) -> dict[str, Any]:
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


def _run(target: ClusterJob, pod: str, command: list[str], stream: BinaryIO) -> dict[str, Any]:
    """Run the command with its output into `stream`, and compare the digest of what was received
    with the one it reports.
    """
    import hashlib

    digest = hashlib.sha256()
    stderr = bytearray()

    def receive(data: bytes) -> None:
        digest.update(data)
        stream.write(data)

    code = target.cluster.exec(pod, command, container=CONTAINER, out=receive, err=stderr.extend)
    lines = stderr.decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
    if code != 0:
        raise KdistError(f"{target.name}: {lines[-1][:400]}")
    try:
        document: Any = parse_json(lines[-1])
    except MalformedTextError:
        document = None
    if not isinstance(document, dict) or document.get("sha256") != digest.hexdigest():
        raise KdistError(
            f"the weights from pod {pod} arrived incomplete or damaged", hint="try again"
        )
    return document

"""The checkpoints of a job in the cluster: listed, verified, and exported to this machine as a file
of weights.

The trainer's tool runs in a running pod of the job, or else in a helper pod, which is created for
the purpose and deleted afterwards. That has the image, account and volumes of the job, mounts only
the checkpoints, and mounts them read-only unless they are to be archived. For checkpoints in a
bucket it mounts an empty volume and has the variables by which the job reaches the bucket. An
export always uses a helper pod, because reading weights needs torch and memory that a training may
not have to spare.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kdist import rbac
from kdist.backends import RUNTIME
from kdist.deploy import Difference
from kdist.deploy.helper_pod import (
    CONTAINER,
    IDLE,
    IDLE_SECONDS,
    POD_RIGHTS,
    TOOL_TIMEOUT,
    build_helper_pod,
    start_helper_pod,
    wait_for_phase,
    wait_until_running,
)
from kdist.errors import Code, KdistError, NotFoundError
from kdist.job.cluster import applied
from kdist.job.cluster.applied import AppliedJob
from kdist.job.job import Notify
from kdist.manifest import Manifest
from kdist.render import find_pods
from kdist.status.documents import parse

RIGHTS = (*POD_RIGHTS, *rbac.on_pods("get", part="log"))
"""Rights needed for a helper pod."""
NO_POD = "no pod of {} runs: starting a helper pod"


@contextmanager
def helper_pod(
    target: AppliedJob,
    command: Sequence[str],
    *,
    read_only: bool = True,
    memory: str = "256Mi",
    seconds: int = TOOL_TIMEOUT,
    node: str = "",
) -> Iterator[str]:
    """Create a pod with the job's checkpoints, and delete it at the end of the context.

    Args:
        target: the job.
        command: what the pod runs.
        read_only: whether it mounts the checkpoints read-only.
        memory: request and limit of its memory.
        seconds: after which Kubernetes ends it.
        node: on which it runs; any node if empty.

    Yields:
        The name of the pod.

    Raises:
        KdistError: rights are missing (FORBIDDEN), or the server rejects the pod.
    """
    live = [] if target.is_resource else _find_live(target)
    document = build_helper_pod(
        target.job,
        target.backend,
        live or applied.render_objects(target.without_code()),
        command,
        read_only=read_only,
        memory=memory,
    )
    rbac.require(target.cluster, RIGHTS)
    if not (live or target.is_resource):
        what = (
            f"{target.name} has no {target.backend.kind}: the pod that reads its checkpoints is "
            f"made from what ConfigMap {target.name} in namespace {target.namespace} says"
        )
        target.dialog.approve(what, Difference.text(document).splitlines())
    with start_helper_pod(target.objects, document, seconds=seconds, node=node) as name:
        yield name


def _find_live(target: AppliedJob) -> list[Manifest]:
    """The object in the cluster that the job's pods are made from, which its ConfigMap cannot
    change; empty if there is none.
    """
    try:
        found = target.workload()
        if not any(find_pods(found)):  # a TrainJob's are in its runtime
            version = target.backend.api_version
            found = target.cluster.get(version, RUNTIME, target.name)
            target.owner.check(found, api_version=version, kind=RUNTIME)
    except NotFoundError:
        return []
    return [Manifest(found)]


@contextmanager
def idle_pod(
    target: AppliedJob,
    command: Sequence[str] = IDLE,
    *,
    seconds: int = IDLE_SECONDS,
    memory: str = "256Mi",
    node: str = "",
) -> Iterator[str]:
    """A helper pod in which commands can be run until the block ends, once it runs.

    Takes the arguments of `helper_pod`; the command only has to wait.

    Raises:
        KdistError: it cannot start.
    """
    with helper_pod(target, command, seconds=seconds, memory=memory, node=node) as pod:
        wait_until_running(target.cluster, pod)
        yield pod


@contextmanager
def reading_pod(target: AppliedJob, notify: Notify) -> Iterator[tuple[str, str]]:
    """A pod in which the trainer's tools can be run several times, and its container: a running one
    of the job, or else a helper pod. Raises as `idle_pod` does.
    """
    running = next((pod for pod in target.pods() if pod.running and not pod.deleting), None)
    if running is not None:
        yield running.name, running.container
        return
    notify(NO_POD.format(target.name))
    with idle_pod(target) as pod:
        yield pod, CONTAINER


MODULE = "kdist_trainer.checkpoint"


def run_tool(target: AppliedJob, action: str, *arguments: str, notify: Notify) -> dict[str, Any]:
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
        code, answer = target.cluster.run(
            running.name, command, container=running.container, timeout=TOOL_TIMEOUT
        )
        return read_answer(answer.decode(errors="replace"), code, running.name)
    notify(NO_POD.format(target.name))
    with helper_pod(target, command, read_only=action != "aside") as name:
        phase = wait_for_phase(target.cluster, name, ("Succeeded", "Failed"))
        # the answer is the last document of the log, whatever the image prints before it
        output = deque(target.cluster.logs(name, container=CONTAINER), _LAST_LINES)
        return read_answer("\n".join(output), 0 if phase == "Succeeded" else 1, name)


def archive(target: AppliedJob) -> str | None:
    """Move the checkpoints of a job without pods aside, and return where they are; None if it has
    none. Raises as `run_tool` does.
    """
    if not has_checkpoints(target):
        return None
    moved: str | None = run_tool(target, "aside", notify=target.dialog.notify).get("moved")
    return moved


def has_checkpoints(target: AppliedJob) -> bool:
    """Whether the job keeps checkpoints in the cluster."""
    spec = target.job.spec.checkpoints
    return spec is not None and spec.in_cluster


def check_has_checkpoints(target: AppliedJob) -> None:
    """Raises `KdistError` for a job that keeps no checkpoints in the cluster."""
    if not has_checkpoints(target):
        raise KdistError(
            f"{target.name} has no checkpoints in the cluster, where its steps and their times "
            "would be too",
            hint="give the job `spec.checkpoints: {size: 10Gi}`, or a claim or bucket of yours",
            next_command="kdist explain spec.checkpoints",
        )


def read_answer(output: str, code: int, pod: str) -> dict[str, Any]:
    """The JSON document in the tool's output. `verify` prints one although it exits with 1."""
    for line in reversed(output.split("\n")):
        if found := parse(line, allow_nan=True):
            return found
    last = output.strip().splitlines()[-1:] or [f"exit code {code}"]
    raise KdistError(f"pod {pod} could not read the checkpoints: {last[0][:300]}", code=Code.ERROR)


_LAST_LINES = 100
_EXPORT_MEMORY = "1536Mi"
_END_BYTES = 1 << 16  # of what it writes to stderr, whose last line is read


def export(target: AppliedJob, file: Path, *arguments: str, notify: Notify) -> dict[str, Any]:
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


def _run(target: AppliedJob, pod: str, command: list[str], stream: BinaryIO) -> dict[str, Any]:
    """Run the command with its output into `stream`, and compare the digest of what was received
    with the one it reports.
    """
    import hashlib

    digest = hashlib.sha256()
    stderr = bytearray()

    def receive(data: bytes) -> None:
        digest.update(data)
        stream.write(data)

    def keep_end(data: bytes) -> None:
        stderr.extend(data)
        del stderr[:-_END_BYTES]

    code = target.cluster.exec(pod, command, container=CONTAINER, out=receive, err=keep_end)
    lines = stderr.decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
    if code != 0:
        raise KdistError(f"{target.name}: {lines[-1][:400]}")
    document = parse(lines[-1])
    if document.get("sha256") != digest.hexdigest():
        raise KdistError(
            f"the weights from pod {pod} arrived incomplete or damaged", hint="try again"
        )
    return document

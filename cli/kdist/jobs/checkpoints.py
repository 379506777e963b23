"""The checkpoints of a job in the cluster: listed, verified, and exported to this machine as a file
of weights. `checkpoint_rows` shows which checkpoint is LATEST, which one a training would resume
from, and which are damaged.

The trainer's tool runs in a running pod of the job, or else in a helper pod that is created for the
purpose and deleted afterwards. The helper pod has the image, account and volumes of the job, mounts
only the checkpoints, and mounts them read-only unless checkpoints are to be archived. An export
always uses a helper pod, because reading weights needs torch and memory that a training may not
have to spare.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kdist import rbac
from kdist.errors import Code, KdistError
from kdist.jobs import job, wait
from kdist.jobs.job import ClusterJob
from kdist.jobs.wait import Notify
from kdist.manifest import Manifest
from kdist.status.documents import at, items, text
from kdist.units import age, number, size

HEADER = ("STEP", "NAME", "AGE", "SIZE", "RANKS", "SAMPLES", "STATE", "")


def checkpoint_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per checkpoint of a listing, newest first."""
    return [_row(entry, document) for entry in entries(document)]


def entries(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The checkpoints in a listing."""
    found = document.get("checkpoints")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def rejected(document: Mapping[str, Any], state: str) -> list[str]:
    """Names of committed checkpoints that are `damaged`, or `unsupported` (of a newer version)."""
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
_HELPER_LABEL = "kdist.dev/viewer"
RIGHTS = (*rbac.on_pods("get create delete"), *rbac.on_pods("get", part="log"))
"""Rights needed for a helper pod."""
_START_TIMEOUT = 180.0  # seconds
_TOOL_TIMEOUT = 600
_MOUNT = "/checkpoints"
_COPIED_FIELDS = (
    "nodeSelector",
    "tolerations",
    "imagePullSecrets",
    "securityContext",
    "priorityClassName",
    "runtimeClassName",
)


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
            running.name, command, container=running.container, timeout=_TOOL_TIMEOUT
        )
        return _read(output.decode(errors="replace"), code, running.name)
    notify(f"no pod of {target.name} runs: starting a helper pod")
    return _run_in_helper_pod(target, command, read_only=action != "aside")


def check_has_checkpoints(target: ClusterJob) -> None:
    """Raises `KdistError` for a job that keeps no checkpoints in the cluster."""
    spec = target.job.spec.checkpoints
    if spec is None or (spec.claim is None and spec.size is None):
        raise KdistError(
            f"{target.name} has no checkpoints in the cluster",
            next_command="kdist explain spec.checkpoints",
        )


def _run_in_helper_pod(
    target: ClusterJob, command: Sequence[str], *, read_only: bool
) -> dict[str, Any]:
    with helper_pod(target, command, read_only=read_only) as name:
        phase = wait_for_phase(target, name, ("Succeeded", "Failed"))
        output = "\n".join(target.cluster.logs(name, container="viewer"))
        return _read(output, 0 if phase == "Succeeded" else 1, name)


@contextmanager
def helper_pod(
    target: ClusterJob,
    command: Sequence[str],
    *,
    read_only: bool = True,
    memory: str = "256Mi",
    seconds: int = _TOOL_TIMEOUT,
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
    name = f"{target.name[:40].rstrip('-')}-viewer-{secrets.token_hex(3)}"
    manifests = job.render_objects(target.without_code())
    document = build_helper_pod(
        target, manifests, name, command, read_only=read_only, memory=memory
    )
    document["spec"]["activeDeadlineSeconds"] = seconds
    if node:
        terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        document["spec"]["affinity"] = {"nodeAffinity": required}
    rbac.require(target.cluster, RIGHTS)
    target.cluster.create(document, namespace=target.namespace)
    try:
        yield name
    finally:
        target.cluster.delete("v1", "Pod", name, grace=0)


def wait_for_phase(target: ClusterJob, name: str, phases: Collection[str]) -> str:
    """Wait until the helper pod is in one of these phases, and return it. Raises `KdistError` if it
    cannot start.
    """
    return wait.wait_until(
        lambda: _phase(target, name, phases),
        timeout=_START_TIMEOUT,
        what=f"helper pod {name} to run",
        notify=lambda _: None,
        next_command=f"kubectl describe pod {name} -n {target.namespace}",
    )


def _phase(target: ClusterJob, name: str, phases: Collection[str]) -> str | None:
    pod = target.cluster.get("v1", "Pod", name)
    for status in items(pod, "status", "containerStatuses"):
        reason = text(status, "state", "waiting", "reason")
        if reason in (
            "ErrImagePull",
            "ImagePullBackOff",
            "InvalidImageName",
            "CreateContainerConfigError",
        ):
            raise KdistError(
                f"pod {name} cannot start: {reason}: {text(status, 'state', 'waiting', 'message')}"
            )
    phase = text(pod, "status", "phase")
    return phase if phase in phases else None


def build_helper_pod(
    target: ClusterJob,
    manifests: Sequence[Manifest],
    name: str,
    command: Sequence[str],
    *,
    read_only: bool,
    memory: str = "256Mi",
) -> dict[str, Any]:
    """Build the helper pod from the training's pod: its image, rights and node selection, and the
    volume with the checkpoints.

    Args:
        target: the job.
        manifests: its rendered objects.
        name: of the helper pod.
        command: what it runs.
        read_only: whether it mounts the checkpoints read-only.
        memory: request and limit of its memory.
    """
    pod = next((found for one in manifests for found in pod_specs(one.document)), {})
    trainer = next(
        (one for one in items(pod, "containers") if one.get("name") == target.backend.container), {}
    )
    mounts = [mount for mount in items(trainer, "volumeMounts") if mount.get("mountPath") == _MOUNT]
    volumes = [
        one for one in items(pod, "volumes") if mounts and one.get("name") == mounts[0].get("name")
    ]
    for volume in volumes:
        if read_only and at(volume, "persistentVolumeClaim") is not None:
            mounts = [{**mount, "readOnly": True} for mount in mounts]
    container = _make_container(trainer, command, mounts, memory=memory)
    spec = {key: pod[key] for key in _COPIED_FIELDS if key in pod}
    # a volume may be mounted by its cloud identity
    if target.job.spec.service_account_name is not None:
        spec["serviceAccountName"] = target.job.spec.service_account_name
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/managed-by": "kdist",
                "app.kubernetes.io/component": "viewer",
                _HELPER_LABEL: target.name,
            },
        },
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _TOOL_TIMEOUT,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": volumes,
        },
    }


def _make_container(
    trainer: Mapping[str, Any], command: Sequence[str], mounts: list[Any], *, memory: str
) -> dict[str, Any]:
    """The helper pod's container, with the image and the rights of the training's container."""
    return {
        "name": "viewer",
        "image": trainer.get("image"),
        "imagePullPolicy": trainer.get("imagePullPolicy", "IfNotPresent"),
        "command": list(command),
        "env": [
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - in the pod
        ],
        "resources": {name: {"cpu": "200m", "memory": memory} for name in ("requests", "limits")},
        "securityContext": trainer.get("securityContext", {}),
        "volumeMounts": mounts,
    }


def pod_specs(document: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every pod spec in a document, at any depth."""
    if isinstance(document, Mapping):
        if isinstance(document.get("containers"), list):
            yield document
        for value in document.values():
            yield from pod_specs(value)
    elif isinstance(document, list):
        for value in document:
            yield from pod_specs(value)


def _read(output: str, code: int, pod: str) -> dict[str, Any]:
    """The JSON document in the tool's output. `verify` prints one although it exits with 1."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    last = output.strip().splitlines()[-1:] or [f"exit code {code}"]
    raise KdistError(f"pod {pod} could not read the checkpoints: {last[0][:300]}", code=Code.ERROR)


_EXPORT_MEMORY = "1536Mi"
_EXPORT_SECONDS = 6 * 3600
_IDLE = ["python", "-c", f"import time; time.sleep({_EXPORT_SECONDS})"]


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
    with helper_pod(
        target, _IDLE, memory=_EXPORT_MEMORY, seconds=_EXPORT_SECONDS, node=running
    ) as pod:
        if wait_for_phase(target, pod, ("Running", "Succeeded", "Failed")) != "Running":
            again = f"kubectl describe pod {pod} -n {target.namespace}"
            raise KdistError(f"pod {pod} ended too early", next_command=again)
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

    code = target.cluster.exec(pod, command, container="viewer", out=receive, err=stderr.extend)
    lines = stderr.decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
    if code != 0:
        raise KdistError(f"{target.name}: {lines[-1][:400]}")
    try:
        document: Any = json.loads(lines[-1])
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("sha256") != digest.hexdigest():
        raise KdistError(
            f"the weights from pod {pod} arrived incomplete or damaged", hint="try again"
        )
    return document

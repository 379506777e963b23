"""The checkpoints of a job in the cluster: listed, verified, and exported to this machine as a file
of weights. `checkpoint_rows` shows which checkpoint is LATEST, which one a training would resume
from, and which are damaged.

Questions are answered in a running pod of the job, or else in a viewer pod that is created for the
purpose and deleted afterwards. The viewer pod has the image, account and volumes of the job, mounts
only the checkpoints, and mounts them read-only unless checkpoints are to be set aside. An export
always uses a viewer pod, because reading weights needs torch and memory that a training may not
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
from kdist.jobs.wait import Tell
from kdist.manifest import Manifest
from kdist.status.documents import at, items, text
from kdist.units import number, seconds, size

HEADER = ("STEP", "NAME", "AGE", "SIZE", "RANKS", "SAMPLES", "STATE", "")


def checkpoint_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row per checkpoint, newest first, as the trainer listed them."""
    return [_row(entry, document) for entry in entries(document)]


def entries(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The checkpoints in a listing."""
    found = document.get("checkpoints")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def damaged(document: Mapping[str, Any]) -> list[str]:
    """Names of committed checkpoints that do not verify."""
    return [
        str(one.get("name"))
        for one in entries(document)
        if one.get("state") == "damaged" and one.get("problem")
    ]


def _row(entry: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[str, ...]:
    state = str(entry.get("state"))
    problem = entry.get("problem")
    written, now = entry.get("time"), document.get("time")
    age = (
        seconds(max(0.0, now - written))
        if isinstance(written, int | float) and isinstance(now, int | float)
        else "-"
    )
    return (
        _shown(entry.get("step")),
        str(entry.get("name")),
        age,
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
PURPOSE = "kdist.dev/viewer"
RIGHTS = (*rbac.on_pods("get create delete"), *rbac.on_pods("get", part="log"))
"""What it takes to look with a pod of its own."""
_START_SECONDS = 180.0
_ANSWER_SECONDS = 600
_MOUNT = "/checkpoints"
_KEPT = (
    "nodeSelector",
    "tolerations",
    "imagePullSecrets",
    "securityContext",
    "priorityClassName",
    "runtimeClassName",
)


def ask(target: ClusterJob, question: str, *arguments: str, tell: Tell) -> dict[str, Any]:
    """The trainer's answer about the folder of checkpoints: `list`, `verify`, `ledger`, `aside`.

    Raises `KdistError` for a job without checkpoints, and where no pod can look.
    """
    check_there_are(target)
    command = ["python", "-m", MODULE, question, target.checkpoints, *arguments]
    running = next((pod for pod in target.pods() if pod.running and not pod.deleting), None)
    if running is not None and question != "aside":
        code, output = target.cluster.run(
            running.name, command, container=running.container, timeout=_ANSWER_SECONDS
        )
        return _read(output.decode(errors="replace"), code, running.name)
    tell("no pod of it runs: a small pod looks into its checkpoints")
    return _ask_in_a_pod(target, command, read_only=question != "aside")


def check_there_are(target: ClusterJob) -> None:
    """Raises `KdistError` for a job that keeps no checkpoints in the cluster."""
    spec = target.job.spec.checkpoints
    if spec is None or (spec.claim is None and spec.size is None):
        raise KdistError(
            f"{target.name} has no checkpoints in the cluster",
            next_command="kdist explain spec.checkpoints",
        )


def _ask_in_a_pod(target: ClusterJob, command: Sequence[str], *, read_only: bool) -> dict[str, Any]:
    with looking(target, command, read_only=read_only) as name:
        phase = wait_for(target, name, ("Succeeded", "Failed"))
        output = "\n".join(target.cluster.logs(name, container="viewer"))
        return _read(output, 0 if phase == "Succeeded" else 1, name)


@contextmanager
def looking(
    target: ClusterJob,
    command: Sequence[str],
    *,
    read_only: bool = True,
    memory: str = "256Mi",
    seconds: int = _ANSWER_SECONDS,
    node: str = "",
) -> Iterator[str]:
    """Name of a pod with the job's checkpoints that runs `command` for at most `seconds`; it goes
    with the block.

    It runs on `node` if one is named.
    """
    name = f"{target.name[:40].rstrip('-')}-viewer-{secrets.token_hex(3)}"
    manifests = job.render_anew(target.without_code())
    document = viewer(target, manifests, name, command, read_only=read_only, memory=memory)
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


def wait_for(target: ClusterJob, name: str, phases: Collection[str]) -> str:
    """Wait until the pod is in one of `phases`, and say in which. Raises `KdistError`."""
    return wait.wait_until(
        lambda: _phase(target, name, phases),
        timeout=_START_SECONDS,
        what=f"pod {name} to look into the checkpoints",
        tell=lambda _: None,
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


def viewer(
    target: ClusterJob,
    manifests: Sequence[Manifest],
    name: str,
    command: Sequence[str],
    *,
    read_only: bool,
    memory: str = "256Mi",
) -> dict[str, Any]:
    """The pod that looks: image, rights and place of the training's pod, the checkpoints' volume,
    and nothing else of it.
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
    spec = {key: pod[key] for key in _KEPT if key in pod}
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
                PURPOSE: target.name,
            },
        },
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _ANSWER_SECONDS,
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
    """The viewer's container, with the image and the rights of the training's container."""
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
    """Every pod spec in a document, wherever its kind keeps it."""
    if isinstance(document, Mapping):
        if isinstance(document.get("containers"), list):
            yield document
        for value in document.values():
            yield from pod_specs(value)
    elif isinstance(document, list):
        for value in document:
            yield from pod_specs(value)


def _read(output: str, code: int, pod: str) -> dict[str, Any]:
    """The one JSON line of the answer. `verify` ends with 1 and answers all the same."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    said = output.strip().splitlines()[-1:] or [f"exit code {code}"]
    raise KdistError(
        f"pod {pod} could not look into the checkpoints: {said[0][:300]}", code=Code.ERROR
    )


_MEMORY = "1536Mi"
_SECONDS = 6 * 3600
_IDLE = ["python", "-c", f"import time; time.sleep({_SECONDS})"]


def export(target: ClusterJob, file: Path, *arguments: str, tell: Tell) -> dict[str, Any]:
    """Write the weights to `file`, whole or not at all, and say what it holds. Raises `KdistError`.

    `arguments` are those of `python -m kdist_trainer.checkpoint export`.
    """
    check_there_are(target)
    running = next((pod.node for pod in target.pods() if pod.running and not pod.deleting), "")
    tell("a small pod reads its checkpoints")
    # Beside a pod that runs, because not every volume can be mounted on a second node.
    with looking(target, _IDLE, memory=_MEMORY, seconds=_SECONDS, node=running) as pod:
        if wait_for(target, pod, ("Running", "Succeeded", "Failed")) != "Running":
            again = f"kubectl describe pod {pod} -n {target.namespace}"
            raise KdistError(f"pod {pod} ended before it was asked", next_command=again)
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
    """Run the command, its output into `stream`, and compare what came with what it says it
    sent.
    """
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

"""Helper pods: small pods with the image, rights and node selection of a job's pods, which mount
nothing of the job but its checkpoints, and are deleted as soon as they have served their purpose.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kdist import rbac
from kdist.backends import Backend
from kdist.errors import Code, KdistError
from kdist.manifest import MANAGED_BY, OWNER, Manifest, mark
from kdist.render import find_pods
from kdist.spec import TrainingJob
from kdist.spec.validators import CHECKPOINTS_MOUNT
from kdist.status.documents import at, condition, items, text
from kdist.status.pods import CONFIG_FAILURES, PACKAGES, PULL_FAILURES

if TYPE_CHECKING:
    from kdist.cluster import Cluster, JobObjects

_HELPER_LABEL = "kdist.dev/viewer"
POD_RIGHTS = rbac.on_pods("get create delete")
"""Rights needed for a helper pod."""
_SCHEDULING_TIMEOUT = 180.0  # seconds
_START_TIMEOUT = 600.0  # seconds, in which its image may have to be pulled
TOOL_TIMEOUT = 600
_COPIED_FIELDS = (
    "nodeSelector",
    "tolerations",
    "imagePullSecrets",
    "securityContext",
    "priorityClassName",
    "runtimeClassName",
)
_STORE_VARIABLES = re.compile(
    "(AWS|AZURE|GOOGLE|KDIST_CHECKPOINTS)_|SSL_CERT_|(HTTP|HTTPS|NO|ALL)_PROXY$", re.IGNORECASE
)
"""Names of the variables by which a program finds a bucket, and the way to it."""
IDLE_SECONDS: Final = 6 * 3600
IDLE: Final = ["python", "-c", f"import time; time.sleep({IDLE_SECONDS})"]
_COPY_SIZE = "1Gi"
CONTAINER: Final = "viewer"
"""Its name in every helper pod."""


@contextmanager
def start_helper_pod(
    objects: JobObjects, document: dict[str, Any], *, seconds: int, node: str = ""
) -> Iterator[str]:
    """Create a helper pod, which Kubernetes ends after so many seconds, on any node unless one is
    named; yields its name, and deletes it at the end of the context. Raises `KdistError` if the
    server rejects it.
    """
    name = document["metadata"]["name"]
    document["spec"]["activeDeadlineSeconds"] = seconds
    if node:
        terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        document["spec"]["affinity"] = {"nodeAffinity": required}
    try:
        objects.create(document)
        yield name
    finally:
        objects.remove("v1", "Pod", name, grace=0)


def wait_until_running(
    cluster: Cluster, name: str, *, notify: Callable[[str], None] = lambda _: None
) -> None:
    """Wait until commands can be run in the helper pod. Raises `KdistError` if it cannot start."""
    phases = ("Running", "Succeeded", "Failed")
    if wait_for_phase(cluster, name, phases, notify=notify) != "Running":
        raise KdistError(f"pod {name} ended too early", next_command=_show_events(cluster, name))


def wait_for_phase(
    cluster: Cluster,
    name: str,
    phases: Collection[str],
    *,
    notify: Callable[[str], None] = lambda _: None,
) -> str:
    """Wait until the helper pod is in one of these phases, and return it; `notify` is called once
    if it takes long. Raises `KdistError` if the pod cannot start.
    """
    from kdist.cluster.polling import wait_until

    began, next_command = time.monotonic(), _show_events(cluster, name)

    def look() -> str | None:
        pod = cluster.get("v1", "Pod", name)
        for status in items(pod, "status", "containerStatuses"):
            reason = text(status, "state", "waiting", "reason")
            if reason in PULL_FAILURES + CONFIG_FAILURES:
                why = text(status, "state", "waiting", "message")
                raise KdistError(f"pod {name} cannot start: {reason}: {why}")
        why = text(condition(pod, "PodScheduled"), "message")
        if why and time.monotonic() - began > _SCHEDULING_TIMEOUT:
            message = f"helper pod {name} has no node after {_SCHEDULING_TIMEOUT:.0f} s: {why}"
            raise KdistError(message, next_command=next_command, code=Code.TIMEOUT)
        phase = text(pod, "status", "phase")
        return phase if phase in phases else None

    return wait_until(
        look,
        timeout=_START_TIMEOUT,
        what=f"helper pod {name} to run",
        notify=notify,
        next_command=next_command,
    )


def _show_events(cluster: Cluster, name: str) -> str:
    """The command that shows what became of a pod, also when it is deleted."""
    return f"kubectl get events -n {cluster.namespace} --field-selector involvedObject.name={name}"


def build_helper_pod(
    job: TrainingJob,
    backend: Backend,
    manifests: Sequence[Manifest],
    command: Sequence[str] = IDLE,
    *,
    read_only: bool = True,
    memory: str = "256Mi",
    tools: bool = True,
    for_new_volume: bool = False,
) -> dict[str, Any]:
    """Build the helper pod from the training's pod: its image, rights and node selection, and the
    volume with the checkpoints.

    Args:
        job: the job.
        backend: its workload kind.
        manifests: its rendered objects.
        command: what it runs.
        read_only: whether it mounts the checkpoints read-only.
        memory: request and limit of its memory.
        tools: whether the trainer's tools run in it.
        for_new_volume: whether it asks for all that the job's pods ask for, so that the volume that
            is made for it is where they can run.
    """
    name = f"{job.metadata.name[:40].rstrip('-')}-viewer-{secrets.token_hex(3)}"
    specs = (pod["spec"] for each in manifests for pod in find_pods(each.document))
    pod: Mapping[str, Any] = next(specs, {})
    trainer = next(
        (one for one in items(pod, "containers") if one.get("name") == backend.container), {}
    )
    volumes, mounts = _find_volumes(job, pod, trainer, read_only=read_only)
    small = {"cpu": "200m", "memory": memory}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": trainer.get("image"),
        "imagePullPolicy": trainer.get("imagePullPolicy", "IfNotPresent"),
        "command": list(command),
        "env": [
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - in the pod
        ],
        "resources": trainer.get("resources")
        if for_new_volume
        else {"requests": small, "limits": small},
        "securityContext": trainer.get("securityContext", {}),
        "volumeMounts": mounts,
    }
    copied = (*_COPIED_FIELDS, *(("affinity",) if for_new_volume else ()))
    spec = {key: pod[key] for key in copied if key in pod}
    if tools and job.checkpoint_claim is None:
        variables = items(trainer, "env")
        container["env"] += [one for one in variables if _STORE_VARIABLES.match(text(one, "name"))]
        spec["serviceAccountName"] = pod.get("serviceAccountName")
    installs = [one for one in items(pod, "initContainers") if one.get("name") == PACKAGES]
    if tools and installs:  # the image has no trainer
        named = {one.get("name") for one in [*items(installs[0], "volumeMounts"), *volumes]}
        volumes = [one for one in items(pod, "volumes") if one.get("name") in named]
        shared = ("packages", "packages-cache")
        mounts += [one for one in items(trainer, "volumeMounts") if one.get("name") in shared]
        variables = items(trainer, "env")
        container["env"] += [one for one in variables if one.get("name") == "PYTHONPATH"]
        spec["initContainers"] = installs
    # a volume may be mounted by its cloud identity
    if (account := pod.get("serviceAccountName")) not in (None, job.metadata.name):
        spec["serviceAccountName"] = account
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {
                MANAGED_BY: "kdist",
                "app.kubernetes.io/component": CONTAINER,
                _HELPER_LABEL: job.metadata.name,
            },
            "annotations": {OWNER: mark(job.metadata.name, "Pod", name)},
        },
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": TOOL_TIMEOUT,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": volumes,
        },
    }


def _find_volumes(
    job: TrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any], *, read_only: bool
) -> tuple[list[Any], list[Any]]:
    """The volume of the checkpoints and its mount; for those in a bucket, room for a copy."""
    if job.checkpoint_claim is None:
        room = {"name": "tmp", "emptyDir": {"sizeLimit": _COPY_SIZE}}
        return [room], [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - in the pod
    mounts = [
        mount
        for mount in items(trainer, "volumeMounts")
        if mount.get("mountPath") == CHECKPOINTS_MOUNT
    ]
    volumes = [
        one for one in items(pod, "volumes") if mounts and one.get("name") == mounts[0].get("name")
    ]
    for volume in volumes:
        if read_only and at(volume, "persistentVolumeClaim") is not None:
            mounts = [{**mount, "readOnly": True} for mount in mounts]
    return volumes, mounts

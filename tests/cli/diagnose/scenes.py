"""Scenes of jobs that are stuck: snapshots built from objects and events as a cluster shows
them.
"""

from __future__ import annotations

from typing import Any

from kdist.status import Snapshot, WorkloadState
from tests.cli.status.objects import NOW, Document, at, config_map, pod, workload

_NORMAL = ("Scheduled", "Pulling", "Pulled", "Created", "Started", "Killing", "SuccessfulCreate")
ACTIVE = WorkloadState(active=2)
FAILED = WorkloadState(
    failed=1,
    finished="failed",
    reason="PodFailurePolicy",
    message="Container trainer failed with exit code 70",
)


def scene(
    pods: list[Document],
    *events: Document,
    state: WorkloadState | None = ACTIVE,
    reported: Document | None = None,
    over: Document | None = None,
    **more: Any,
) -> Snapshot:
    """One job of two nodes as it was seen."""
    return Snapshot(
        name="digits",
        namespace="ml",
        config_map=reported or config_map(),
        workload=over or workload(),
        state=state,
        pods=pods,
        events=events,
        taken=NOW.timestamp(),
        **more,
    )


def event(
    reason: str, message: str, *, kind: str = "Pod", name: str = "", ago: float = 20, count: int = 1
) -> Document:
    """An event about a pod (the first, by default) or about something else of the job."""
    about = {
        "kind": kind,
        "name": name or ("digits-0-abcde" if kind == "Pod" else "digits"),
        "namespace": "ml",
    }
    return {
        "involvedObject": about,
        "reason": reason,
        "message": message,
        "lastTimestamp": at(ago),
        "count": count,
        "type": "Normal" if reason in _NORMAL else "Warning",
    }


def refused(message: str, *, kind: str = "Job") -> Snapshot:
    """A job whose pods the API server does not admit."""
    return scene([], event("FailedCreate", message, kind=kind))


def node(
    name: str,
    *,
    cpu: str = "8",
    memory: str = "32Gi",
    gpu: str = "0",
    ready: str = "True",
    ago: float = 120,
) -> Document:
    """A node; ready is True, False or Unknown."""
    printed = {"Unknown": "Kubelet stopped posting node status."}.get(
        ready, "kubelet is posting ready status"
    )
    reason = {"Unknown": "NodeStatusUnknown"}.get(ready, "KubeletReady")
    condition = {
        "type": "Ready",
        "status": ready,
        "reason": reason,
        "message": printed,
        "lastTransitionTime": at(ago),
    }
    allocatable = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": gpu, "pods": "110"}
    return {
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"taints": [{"key": "dedicated", "value": "infra", "effect": "NoSchedule"}]}
        if name == "control"
        else {},
        "status": {"allocatable": allocatable, "conditions": [condition]},
    }


def nodes(*each: Document) -> dict[str, Document]:
    """Nodes by name."""
    return {one["metadata"]["name"]: one for one in each}


def asking(found: Document, **amounts: str) -> Document:
    """The pod with these requests and limits."""
    for container in found["spec"]["containers"]:
        container["resources"] = {"requests": amounts, "limits": amounts}
    return found


def mounting(found: Document, claim: str) -> Document:
    """The pod with a volume of this claim."""
    found["spec"]["volumes"] = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}
    ]
    return found


def claim(name: str, *, phase: str = "Pending", storage_class: str = "fast") -> Document:
    """A volume claim."""
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"storageClassName": storage_class, "accessModes": ["ReadWriteMany"]},
        "status": {"phase": phase},
    }


def creating(index: int = 0, **more: Any) -> Document:
    """A pod that has a node and whose container is being made."""
    state = {"waiting": {"reason": "ContainerCreating"}}
    return pod(
        index,
        phase="Pending",
        containerStatuses=[{"name": "trainer", "state": state, "restartCount": 0}],
        **more,
    )

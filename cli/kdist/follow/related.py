"""Which events are about a job: those of its pods, present and past, of its workload and of its volume claims."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from kdist.status import fields
from kdist.status.fields import Document

_MAKERS = ("Job", "JobSet", "TrainJob", "PyTorchJob", "StatefulSet", "Workload", "ConfigMap", "PodDisruptionBudget")


def is_about(event: Document, name: str, pods: Iterable[Document], claims: Collection[str]) -> bool:
    """Whether the event is about something of the job. Names decide: an event outlives what it is about."""
    kind, about = fields.text(event, "involvedObject", "kind"), fields.text(event, "involvedObject", "name")
    if kind == "Pod":
        return any(fields.name(pod) == about for pod in pods) or is_pod_name(about, name)
    if kind == "PersistentVolumeClaim":
        return about in claims or about == f"{name}-checkpoints"
    if about == name:
        return kind in _MAKERS
    # A JobSet makes Jobs with a name and a number of their own.
    return kind == "Job" and re.fullmatch(rf"{re.escape(name)}-[a-z]+-\d+", about) is not None


def is_pod_name(pod: str, name: str) -> bool:
    """Whether a pod of the job `name` may be called so, on any kind of workload."""
    made = r"(-(worker|master|node|trainer)(-\d+){1,2}|-\d+)(-[a-z0-9]{5})?"
    return re.fullmatch(re.escape(name) + made, pod) is not None

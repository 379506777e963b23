"""A pod of a job: its node, and the state or the end of its training container, or of the init
container before it, in the words of kubectl.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kdist.status import documents
from kdist.status.documents import Document
from kdist.status.exit_record import ExitRecord
from kdist.status.init_container import (
    ContainerTermination,
    InitContainer,
    read_init_container,
    read_termination,
)

# Names of the training container in the different kinds of workloads.
_CONTAINERS = ("trainer", "pytorch", "node")
_INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "apps.kubernetes.io/pod-index",
    "training.kubeflow.org/replica-index",
)
_STARTING_REASONS = ("", "ContainerCreating", "PodInitializing")
_POD_REASONS = ("Evicted", "NodeLost", "Shutdown", "Terminated", "Preempting")  # of the whole pod
_INDEX_IN_NAME = re.compile(r"-(\d+)(-[a-z0-9]{5})?$")


@dataclass(frozen=True)
class Pod:
    """One pod.

    Attributes:
        container: name of the training container.
        index: its index among the job's pods; None if unknown.
        state: the status that kubectl shows.
        reason: why the pod does not run; empty if it does.
        lost: whether the pod's node does not respond, so that its last known state may be stale.
        restarts: restarts of the container.
        created: unix seconds.
        started: unix seconds at which the container started.
        ended: how the container ended; None while it runs.
        before: how the previous container instance ended.
        init: the init container that it is at; None once the training container may start.
    """

    name: str
    container: str
    index: int | None
    node: str
    phase: str
    state: str
    reason: str = ""
    message: str = ""
    ready: bool = False
    running: bool = False
    scheduled: bool = False
    deleting: bool = False
    lost: bool = False
    restarts: int = 0
    created: float | None = None
    started: float | None = None
    ended: ContainerTermination | None = None
    before: ContainerTermination | None = None
    init: InitContainer | None = None

    @property
    def working(self) -> bool:
        """Whether its container runs on a node that responds."""
        return self.running and not self.lost

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def has_run(self) -> bool:
        """Whether its container runs, or has run and ended."""
        return self.running or self.ended is not None or self.before is not None

    @property
    def troubled(self) -> bool:
        """Whether an error keeps it from running."""
        return self.reason not in _STARTING_REASONS

    @property
    def record(self) -> ExitRecord | None:
        """Its newest exit record; None without one."""
        ends = [self.ended, self.before]
        if self.init is not None:
            ends += [self.init.ended, self.init.before]
        return next((end.record for end in ends if end and end.record), None)

    @property
    def fetching(self) -> bool:
        """Whether an init container fetches data or weights for it now."""
        return self.init is not None and self.init.fetches and self.init.running


def find_successor(pod: Pod, pods: Iterable[Pod]) -> Pod | None:
    """The newest pod that has taken the place of `pod`; None if it is the newest of its index."""
    if pod.index is None:
        return None
    later = [
        each
        for each in pods
        if each.index == pod.index
        and each.name != pod.name
        and (each.created or 0.0) > (pod.created or 0.0)
    ]
    return max(later, key=lambda each: each.created or 0.0, default=None)


def read_index(name: str) -> int | None:
    """The index that the name of a pod ends with; None if it has none."""
    found = _INDEX_IN_NAME.search(name)
    return int(found[1][:9]) if found else None


def read_pod(document: Document, *, lost_nodes: Collection[str] = (), answers: bool = False) -> Pod:
    """Read a pod from its object.

    Args:
        document: the object.
        lost_nodes: names of nodes that do not respond.
        answers: whether the pod's agent answers. Such a pod is never lost: after an outage of its
            own, the control plane considers all nodes lost for a while.
    """
    container = container_of(document)
    status = next(
        (
            each
            for each in documents.items(document, "status", "containerStatuses")
            if each.get("name") == container
        ),
        {},
    )
    node = documents.text(document, "spec", "nodeName")
    phase = documents.text(document, "status", "phase")
    running = phase == "Running" and bool(documents.mapping(status, "state", "running"))
    deleting = bool(documents.text(document, "metadata", "deletionTimestamp"))
    silent = not answers and (node in lost_nodes or _is_abandoned(document))
    lost = phase not in ("Succeeded", "Failed") and bool(node) and silent
    ended = read_termination(documents.at(status, "state", "terminated"))
    before = phase in ("Pending", "Failed") and ended is None
    init = read_init_container(document) if before else None
    reason, message = _read_trouble(document, status)
    return Pod(
        name=documents.name(document),
        container=container,
        index=_read_index(document),
        node=node,
        phase=phase,
        state=_name_state(phase, reason, ended, init, deleting=deleting, lost=lost),
        reason=reason,
        message=message,
        ready=running and not lost and documents.at(status, "ready") is True,
        running=running,
        scheduled=bool(node),
        deleting=deleting,
        lost=lost,
        restarts=documents.integer(status, "restartCount") or 0,
        created=documents.moment(document, "metadata", "creationTimestamp"),
        started=documents.moment(status, "state", "running", "startedAt"),
        ended=ended,
        before=read_termination(documents.at(status, "lastState", "terminated")),
        init=init,
    )


def container_of(document: Document) -> str:
    """Return the name of the training container, which differs between kinds of workloads."""
    names = [
        documents.text(each, "name") for each in documents.items(document, "spec", "containers")
    ]
    return next(
        (name for name in _CONTAINERS if name in names), names[0] if names else _CONTAINERS[0]
    )


def _read_index(document: Document) -> int | None:
    for key in _INDEX_LABELS:
        if (found := documents.label(document, key)).isdecimal():
            return int(found[:9])
    return read_index(documents.name(document))


def _is_abandoned(document: Document) -> bool:
    """Whether the pod is marked unready though its containers are ready, as the control plane does
    when a node stops responding.
    """
    if documents.text(document, "status", "reason") == "NodeLost":
        return True
    if documents.items(document, "spec", "readinessGates"):
        return False
    pod_ready = documents.text(documents.condition(document, "Ready"), "status")
    containers_ready = documents.text(documents.condition(document, "ContainersReady"), "status")
    return pod_ready == "False" and containers_ready == "True"


def _read_trouble(document: Document, status: Document) -> tuple[str, str]:
    """Read why the pod does not run: reason and message of the container, of an init container, of
    scheduling, or of the pod.
    """
    for each in (status, *documents.items(document, "status", "initContainerStatuses")):
        waiting = documents.mapping(each, "state", "waiting")
        if documents.text(waiting, "reason") not in _STARTING_REASONS:
            return documents.text(waiting, "reason"), documents.text(waiting, "message")
    scheduled = documents.condition(document, "PodScheduled")
    if documents.text(scheduled, "status") == "False":
        return documents.text(scheduled, "reason"), documents.text(scheduled, "message")
    disrupted = documents.condition(document, "DisruptionTarget")
    if documents.text(disrupted, "status") == "True":
        return documents.text(disrupted, "reason"), documents.text(disrupted, "message")
    if reason := documents.text(document, "status", "reason"):
        return reason, documents.text(document, "status", "message")
    return documents.text(status, "state", "waiting", "reason"), documents.text(
        status, "state", "waiting", "message"
    )


def _name_state(
    phase: str,
    reason: str,
    ended: ContainerTermination | None,
    init: InitContainer | None,
    *,
    deleting: bool,
    lost: bool,
) -> str:
    if lost:
        return "NodeLost"
    if phase == "Succeeded":
        return "Completed"
    if init is not None and not deleting and reason not in _POD_REASONS:
        return init.state
    if phase == "Failed":
        return (ended.reason if ended and ended.reason else reason) or "Error"
    if deleting:
        return "Terminating"
    return (ended.reason if ended and ended.reason and not reason else reason) or phase or "Unknown"

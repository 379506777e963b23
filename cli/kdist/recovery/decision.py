"""Decides which pods of a job may be given up because their node is gone.

A pod is given up if its node's Ready condition is Unknown, the node's Lease has run out, and the
agents that are left no longer hear the pod's. If no agent can tell, it takes one more Lease, and
checkpoints on a volume that all nodes share, whose lock keeps a node that still runs from writing.
Whatever speaks against it prevails, and whatever is missing makes it wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kdist.recovery.evidence import NodeState, RecoveryContext, controller_of
from kdist.status import documents, read_pod
from kdist.status.documents import Document
from kdist.units import count, seconds

_FRESH_SECONDS = 15.0  # how old what was read may be
_PEERS_SECONDS = 30.0  # how old an agent's view of the rendezvous may be
_RETRY_SECONDS = 5.0  # when to look again, where nothing says so


@dataclass(frozen=True)
class PodDecision:
    """Whether a pod on a node that does not answer is given up now.

    Attributes:
        pod: name of the pod.
        uid: of the pod that was judged.
        node: its node.
        recover: whether it is given up now.
        reason: a CamelCase word for why, or why not.
        message: a sentence about that.
        evidence: what was seen of the node, in sentences.
        retry_seconds: when to look again; None if waiting does not help.
    """

    pod: str
    uid: str
    node: str
    recover: bool
    reason: str
    message: str
    evidence: tuple[str, ...] = ()
    retry_seconds: float | None = None


@dataclass(frozen=True)
class _Result:
    reason: str
    message: str
    recover: bool = False
    retry_seconds: float | None = _RETRY_SECONDS


def decide(context: RecoveryContext) -> list[PodDecision]:
    """Decide about each pod that has not ended and whose node is not ready, is late to renew its
    Lease, does not exist, or is said to be switched off. Where nodes cannot be read, the pods show
    which do not answer.
    """
    found = []
    for pod in context.pods:
        name = documents.text(pod, "spec", "nodeName")
        node = context.nodes.get(name)
        if not _is_in_question(context, pod, name, node):
            continue
        result = _judge(context, pod, name, node)
        found.append(
            PodDecision(
                pod=documents.name(pod),
                uid=documents.text(pod, "metadata", "uid"),
                node=name,
                recover=result.recover,
                reason=result.reason,
                message=result.message,
                evidence=tuple(_describe(context, pod, node)) if node is not None else (),
                retry_seconds=None if result.recover else result.retry_seconds,
            )
        )
    return found


def _is_in_question(
    context: RecoveryContext, pod: Document, name: str, node: NodeState | None
) -> bool:
    if not name or documents.text(pod, "status", "phase") in ("Succeeded", "Failed"):
        return False
    if name in context.switched_off:
        return True
    if context.unreadable:
        return read_pod(pod).lost
    return node is None or node.ready != "True" or _is_late(context, node)


def _judge(context: RecoveryContext, pod: Document, name: str, node: NodeState | None) -> _Result:
    vouched = name in context.switched_off
    found = _check_ownership(context, pod)
    if found is None and not context.unreadable:
        found = _check_node(context, name, node)
    if found is None:
        found = _check_agents(context, pod) or _check_volumes(context, name)
    if found is not None:
        return found
    if vouched:
        return _Result("SwitchedOff", f"node {name} is said to be switched off", recover=True)
    if context.unreadable or node is None:
        return _Result("Unreadable", context.unreadable, retry_seconds=None)
    return _check_lease(context, node) or _judge_silence(context, node)


def _check_ownership(context: RecoveryContext, pod: Document) -> _Result | None:
    if controller_of(pod) in context.owners:
        return None
    message = f"the pod was not created for job {context.job}, so kdist does not change it"
    return _Result("NotOwned", message, retry_seconds=None)


def _check_node(context: RecoveryContext, name: str, node: NodeState | None) -> _Result | None:
    """What keeps the state of the nodes from being evidence."""
    if node is None:
        message = f"node {name} was deleted: Kubernetes deletes its pods by itself"
        return _Result("NodeDeleted", message)
    if node.ready == "True" and not _is_late(context, node):
        message = f"node {name} is ready: its kubelet answers, so the machine is not off"
        return _Result("NodeReady", message)
    if node.ready == "True" and name not in context.switched_off:
        message = f"node {name} is late to renew its Lease, and still counts as ready"
        return _Result("LeaseLate", message)
    if node.ready == "False":
        message = f"the kubelet of node {name} answers, and says that it is not ready"
        return _Result("KubeletAnswers", f"{message}: {node.message}" if node.message else message)
    age = context.now - context.read_at
    if age > _FRESH_SECONDS:
        message = f"what is known of node {name} is {seconds(age)} old: it may have returned"
        return _Result("Stale", message)
    return _check_cluster(context, name)


def _check_cluster(context: RecoveryContext, name: str) -> _Result | None:
    """Whether it is the control plane that is cut off, or was until now, and not the node."""
    if name in context.switched_off:
        return None
    nodes, clock = context.nodes.values(), context.clock or 0.0
    unknown = sum(node.ready == "Unknown" for node in nodes)
    expired = sum(_overdue(node, clock) > 0 for node in nodes)
    for number, what in ((unknown, "are unknown"), (expired, "have not renewed their Leases")):
        if 2 * number > len(nodes):
            message = (
                f"{number} of {count(len(nodes), 'node')} {what}: more likely the control plane is "
                "cut off from them, or was until now"
            )
            return _Result("ManyNodes", message)
    return None


def _check_agents(context: RecoveryContext, pod: Document) -> _Result | None:
    """Agents that know that the pod lives."""
    name, address = documents.name(pod), documents.text(pod, "status", "podIP")
    if name in context.reports:
        return _Result("AgentAnswers", f"the agent of {name} answers, so its node is not gone")
    for observer, report in context.survivors().items():
        if report.peers and report.peers.age <= _PEERS_SECONDS and address in report.peers.heard:
            return _Result("AgentHeard", f"the agent of {observer} hears that of {name}")
    return None


def _check_volumes(context: RecoveryContext, name: str) -> _Result | None:
    """Volumes without which another pod could not start."""
    for claim, node in context.storage.pinned.items():
        if node == name:
            message = (
                f"the volume of claim {claim} is on node {name} and nowhere else, so another pod "
                "could not start: only the node's return helps"
            )
            return _Result("VolumeOnNode", message)
    return None


def _check_lease(context: RecoveryContext, node: NodeState) -> _Result | None:
    """Whether the kubelet may still be about to renew the node's Lease."""
    if node.renewed is None or context.clock is None:
        message = f"node {node.name} has no Lease that would show when its kubelet was last alive"
        return _Result("NoLease", message)
    left = -_overdue(node, context.clock)
    if left < 0:
        return None
    message = f"the Lease of node {node.name} has not run out yet"
    return _Result("LeaseHeld", message, retry_seconds=max(1.0, left))


def _judge_silence(context: RecoveryContext, node: NodeState) -> _Result:
    """The result for a node of which nobody hears anything."""
    observers = [
        pod
        for pod, report in context.survivors().items()
        if report.peers is not None and report.peers.age <= _PEERS_SECONDS
    ]
    if observers:
        message = (
            f"node {node.name} does not answer, its Lease has run out, and "
            f"{count(len(observers), 'agent')} of the job no longer "
            f"{'hears' if len(observers) == 1 else 'hear'} its agent"
        )
        return _Result("NodeLost", message, recover=True)
    storage = context.storage
    if not (storage.kind == "shared" and storage.fenced):
        message = f"no agent of the job can tell whether node {node.name} still runs, and "
        return _Result("NotFenced", message + _explain_storage(context), retry_seconds=None)
    left = _without_observers(node, context.clock or 0.0)
    if left >= 0:
        message = (
            f"no agent of the job can tell whether node {node.name} still runs, so kdist waits for "
            "the time of one more Lease"
        )
        return _Result("NoObserver", message, retry_seconds=max(1.0, left))
    message = (
        f"node {node.name} does not answer, and its Lease ran out more than "
        f"{seconds(node.lease_seconds)} ago; the lock of the checkpoints keeps it from writing, "
        "should it still run"
    )
    return _Result("NodeLost", message, recover=True)


def _explain_storage(context: RecoveryContext) -> str:
    storage = context.storage
    if storage.kind == "none":
        return "the job has no checkpoints, whose lock would keep it from doing harm"
    if storage.kind == "unknown":
        return f"claim {storage.claim} cannot be read, so its checkpoints may not be shared"
    if storage.kind == "single":
        return f"claim {storage.claim} can be mounted by one node only"
    return "a script may write without the lock of the checkpoints"


def _overdue(node: NodeState, clock: float) -> float:
    """Seconds since the Lease of a node ran out; negative while it holds."""
    return 0.0 if node.renewed is None else clock - node.renewed - node.lease_seconds


def _is_late(context: RecoveryContext, node: NodeState) -> bool:
    """Whether a node has missed a renewal of its Lease; kubelets try four times before it ends."""
    clock = context.clock
    if clock is None or node.renewed is None:
        return False
    return _overdue(node, clock) > -node.lease_seconds / 2


def _without_observers(node: NodeState, clock: float) -> float:
    """Seconds until a node counts as gone of which no agent can tell."""
    since = max(
        (node.renewed or 0.0) + node.lease_seconds, clock if node.since is None else node.since
    )
    return since + node.lease_seconds - clock


def _describe(context: RecoveryContext, pod: Document, node: NodeState) -> Iterator[str]:
    """What was seen, in sentences."""
    clock = context.clock
    since = f" for {seconds(max(0.0, clock - node.since))}" if clock and node.since else ""
    message = f": {node.message}" if node.message else ""
    yield f"node/{node.name}: Ready is {node.ready}{since}{message}"
    if node.renewed is not None and clock is not None:
        ago, overdue = seconds(clock - node.renewed), _overdue(node, clock)
        state = f"it ran out {seconds(overdue)} ago" if overdue > 0 else "it holds"
        yield (
            f"lease/{node.name}: renewed {ago} before the newest Lease, for "
            f"{seconds(node.lease_seconds)}: {state}"
        )
    address = documents.text(pod, "status", "podIP")
    for observer, report in sorted(context.survivors().items()):
        peers = report.peers
        if peers is None:
            yield f"pod/{observer}: its agent cannot tell which others it hears"
            continue
        verb = "hears" if address in peers.heard else "does not hear"
        yield (
            f"pod/{observer}: its agent {verb} that of {documents.name(pod)}, as of "
            f"{seconds(peers.age)} ago"
        )

"""Decides which pods of a job may be given up because their node is gone.

A pod is given up if its node's Ready condition is Unknown, the node's Lease has run out, and the
agents that are left no longer hear the pod's. If no agent can tell, it takes one more Lease, and
checkpoints on a volume that all nodes share, whose lock keeps a node that still runs from writing.
Whatever speaks against it prevails, and whatever is missing makes it wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kdist.recovery.evidence import NodeState, Situation, controller_of
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
class _Verdict:
    reason: str
    message: str
    recover: bool = False
    retry_seconds: float | None = _RETRY_SECONDS


def decide(situation: Situation) -> list[PodDecision]:
    """Decide about each pod that has not ended and whose node is not ready, is late to renew its
    Lease, does not exist, or is said to be switched off. Where nodes cannot be read, the pods show
    which do not answer.
    """
    found = []
    for pod in situation.pods:
        name = documents.text(pod, "spec", "nodeName")
        node = situation.nodes.get(name)
        if not _is_in_question(situation, pod, name, node):
            continue
        verdict = _judge(situation, pod, name, node)
        found.append(
            PodDecision(
                pod=documents.name(pod),
                uid=documents.text(pod, "metadata", "uid"),
                node=name,
                recover=verdict.recover,
                reason=verdict.reason,
                message=verdict.message,
                evidence=tuple(_describe(situation, pod, node)) if node is not None else (),
                retry_seconds=None if verdict.recover else verdict.retry_seconds,
            )
        )
    return found


def _is_in_question(situation: Situation, pod: Document, name: str, node: NodeState | None) -> bool:
    if not name or documents.text(pod, "status", "phase") in ("Succeeded", "Failed"):
        return False
    if name in situation.switched_off:
        return True
    if situation.unreadable:
        return read_pod(pod).lost
    return node is None or node.ready != "True" or _is_late(situation, node)


def _judge(situation: Situation, pod: Document, name: str, node: NodeState | None) -> _Verdict:
    vouched = name in situation.switched_off
    found = _check_ownership(situation, pod)
    if found is None and not situation.unreadable:
        found = _check_node(situation, name, node)
    if found is None:
        found = _check_agents(situation, pod) or _check_volumes(situation, name)
    if found is not None:
        return found
    if vouched:
        return _Verdict("SwitchedOff", f"node {name} is said to be switched off", recover=True)
    if situation.unreadable or node is None:
        return _Verdict("Unreadable", situation.unreadable, retry_seconds=None)
    return _check_lease(situation, node) or _judge_silence(situation, node)


def _check_ownership(situation: Situation, pod: Document) -> _Verdict | None:
    if controller_of(pod) in situation.owners:
        return None
    message = f"the pod was not created for job {situation.job}, so kdist does not change it"
    return _Verdict("NotOwned", message, retry_seconds=None)


def _check_node(situation: Situation, name: str, node: NodeState | None) -> _Verdict | None:
    """What keeps the state of the nodes from being evidence."""
    if node is None:
        message = f"node {name} was deleted: Kubernetes deletes its pods by itself"
        return _Verdict("NodeDeleted", message)
    if node.ready == "True" and not _is_late(situation, node):
        message = f"node {name} is ready: its kubelet answers, so the machine is not off"
        return _Verdict("NodeReady", message)
    if node.ready == "True" and name not in situation.switched_off:
        message = f"node {name} is late to renew its Lease, and still counts as ready"
        return _Verdict("LeaseLate", message)
    if node.ready == "False":
        message = f"the kubelet of node {name} answers, and says that it is not ready"
        return _Verdict("KubeletAnswers", f"{message}: {node.message}" if node.message else message)
    age = situation.now - situation.read_at
    if age > _FRESH_SECONDS:
        message = f"what is known of node {name} is {seconds(age)} old: it may have returned"
        return _Verdict("Stale", message)
    return _check_cluster(situation, name)


def _check_cluster(situation: Situation, name: str) -> _Verdict | None:
    """Whether it is the control plane that is cut off, or was until now, and not the node."""
    if name in situation.switched_off:
        return None
    nodes, clock = situation.nodes.values(), situation.clock or 0.0
    unknown = sum(node.ready == "Unknown" for node in nodes)
    expired = sum(_overdue(node, clock) > 0 for node in nodes)
    for number, what in ((unknown, "are unknown"), (expired, "have not renewed their Leases")):
        if 2 * number > len(nodes):
            message = (
                f"{number} of {count(len(nodes), 'node')} {what}: more likely the control plane is "
                "cut off from them, or was until now"
            )
            return _Verdict("ManyNodes", message)
    return None


def _check_agents(situation: Situation, pod: Document) -> _Verdict | None:
    """Agents that know that the pod lives."""
    name, address = documents.name(pod), documents.text(pod, "status", "podIP")
    if name in situation.reports:
        return _Verdict("AgentAnswers", f"the agent of {name} answers, so its node is not gone")
    for witness, report in situation.survivors().items():
        if report.peers and report.peers.age <= _PEERS_SECONDS and address in report.peers.heard:
            return _Verdict("AgentHeard", f"the agent of {witness} hears that of {name}")
    return None


def _check_volumes(situation: Situation, name: str) -> _Verdict | None:
    """Volumes without which another pod could not start."""
    for claim, node in situation.storage.pinned.items():
        if node == name:
            message = (
                f"the volume of claim {claim} is on node {name} and nowhere else, so another pod "
                "could not start: only the node's return helps"
            )
            return _Verdict("VolumeOnNode", message)
    return None


def _check_lease(situation: Situation, node: NodeState) -> _Verdict | None:
    """Whether the kubelet may still be about to renew the node's Lease."""
    if node.renewed is None or situation.clock is None:
        message = f"node {node.name} has no Lease that would show when its kubelet was last alive"
        return _Verdict("NoLease", message)
    left = -_overdue(node, situation.clock)
    if left < 0:
        return None
    message = f"the Lease of node {node.name} has not run out yet"
    return _Verdict("LeaseHeld", message, retry_seconds=max(1.0, left))


def _judge_silence(situation: Situation, node: NodeState) -> _Verdict:
    """The verdict on a node of which nobody hears anything."""
    witnesses = [
        pod
        for pod, report in situation.survivors().items()
        if report.peers is not None and report.peers.age <= _PEERS_SECONDS
    ]
    if witnesses:
        message = (
            f"node {node.name} does not answer, its Lease has run out, and "
            f"{count(len(witnesses), 'agent')} of the job no longer "
            f"{'hears' if len(witnesses) == 1 else 'hear'} its agent"
        )
        return _Verdict("NodeLost", message, recover=True)
    storage = situation.storage
    if not (storage.kind == "shared" and storage.fenced):
        message = f"no agent of the job can tell whether node {node.name} still runs, and "
        return _Verdict("NotFenced", message + _explain_storage(situation), retry_seconds=None)
    left = _without_witnesses(node, situation.clock or 0.0)
    if left >= 0:
        message = (
            f"no agent of the job can tell whether node {node.name} still runs, so kdist waits for "
            "the time of one more Lease"
        )
        return _Verdict("NoWitness", message, retry_seconds=max(1.0, left))
    message = (
        f"node {node.name} does not answer, and its Lease ran out more than "
        f"{seconds(node.lease_seconds)} ago; the lock of the checkpoints keeps it from writing, "
        "should it still run"
    )
    return _Verdict("NodeLost", message, recover=True)


def _explain_storage(situation: Situation) -> str:
    storage = situation.storage
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


def _is_late(situation: Situation, node: NodeState) -> bool:
    """Whether a node has missed a renewal of its Lease; kubelets try four times before it ends."""
    clock = situation.clock
    if clock is None or node.renewed is None:
        return False
    return _overdue(node, clock) > -node.lease_seconds / 2


def _without_witnesses(node: NodeState, clock: float) -> float:
    """Seconds until a node counts as gone of which no agent can tell."""
    since = max(
        (node.renewed or 0.0) + node.lease_seconds, clock if node.since is None else node.since
    )
    return since + node.lease_seconds - clock


def _describe(situation: Situation, pod: Document, node: NodeState) -> Iterator[str]:
    """What was seen, in sentences."""
    clock = situation.clock
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
    for witness, report in sorted(situation.survivors().items()):
        peers = report.peers
        if peers is None:
            yield f"pod/{witness}: its agent cannot tell which others it hears"
            continue
        verb = "hears" if address in peers.heard else "does not hear"
        yield (
            f"pod/{witness}: its agent {verb} that of {documents.name(pod)}, as of "
            f"{seconds(peers.age)} ago"
        )

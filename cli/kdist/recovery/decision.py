"""Decides which pods of a job may be evicted because their node is gone.

A pod is evicted if its node's Ready condition is Unknown, the node's Lease has run out, and the
agents that are left no longer hear the pod's. `tolerationSeconds` in `_pod.yaml.j2`, after which
Kubernetes evicts the pods itself, is chosen to match. If no agent can tell, it takes one more
Lease, and checkpoints on a volume that all nodes share, whose lock keeps a node that still runs
from writing. Whatever speaks against it prevails, and whatever is missing makes it wait.

All times of nodes are in unix seconds as the cluster writes them. They are compared with each other
and never with the clock of this machine, which may be wrong: the newest Lease tells the time.

`find_held_volumes` finds what a new pod has to wait for: Kubernetes detaches a volume once the
kubelet has unmounted it, or by force some minutes after the pod there has ended. A volume that
several nodes may mount delays nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from kdist.status import AgentStatus, documents, read_pod
from kdist.status.documents import Document
from kdist.units import count, seconds

LEASE_NAMESPACE: Final = "kube-node-lease"
"""Namespace of the Leases that kubelets renew."""
LEASE_SECONDS: Final = 40.0
"""The kubelet's default duration of a Lease."""
MORE_LEASES: Final = 1
"""How many of them more must pass where no agent can tell whether the node still runs."""
FORCE_DETACH_SECONDS: Final = 360.0
"""After how long Kubernetes detaches a volume by force (`maxWaitForUnmountDuration`)."""
_SINGLE = ("ReadWriteOnce", "ReadWriteOncePod")


@dataclass(frozen=True)
class NodeState:
    """One node.

    Attributes:
        ready: status of its condition Ready: True, False (its kubelet says so) or Unknown (its
            kubelet says nothing).
        since: when that began; None if unknown.
        message: of the condition.
        renewed: when its kubelet has renewed its Lease; None if it has none.
        lease_seconds: how long a renewal holds.
    """

    name: str
    ready: str = "Unknown"
    since: float | None = None
    message: str = ""
    renewed: float | None = None
    lease_seconds: float = LEASE_SECONDS


@dataclass(frozen=True)
class Storage:
    """Where the checkpoints of a job are.

    Attributes:
        kind: `shared` if pods on all nodes can mount it or it is a bucket, `single` if only those
            of one node can, `none` if there is none, `unknown` if it may not be read.
        fenced: whether each commit checks the lock, which a newer worker group takes over. A script
            may write as it likes.
        claim: name of the claim; empty for a bucket.
        pinned: the node that is the only one with the volume, by the name of the claim, for each
            claim of the job with such a volume.
    """

    kind: Literal["shared", "single", "none", "unknown"]
    fenced: bool = True
    claim: str = ""
    pinned: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecoveryContext:
    """All that a decision is made from.

    Attributes:
        job: name of the job.
        pods: the job's pods, as the API server returns them.
        owners: uids of the controllers that create the job's own pods.
        nodes: every node of the cluster by name.
        reports: what the agents of the job answered, by pod.
        storage: where its checkpoints are.
        read_at: when the first of this was read, on the clock of `now`.
        now: the time of the decision.
        switched_off: nodes that a person vouches for being switched off.
        unreadable: why nodes or Leases could not be read; empty if they were.
    """

    job: str
    pods: Sequence[Document]
    owners: frozenset[str]
    nodes: Mapping[str, NodeState]
    reports: Mapping[str, AgentStatus]
    storage: Storage
    read_at: float
    now: float
    switched_off: frozenset[str] = frozenset()
    unreadable: str = ""

    @property
    def clock(self) -> float | None:
        """The newest renewal of any Lease: the cluster's time at the earliest."""
        renewals = [node.renewed for node in self.nodes.values() if node.renewed is not None]
        return max(renewals, default=None)

    def survivors(self) -> dict[str, AgentStatus]:
        """Reports of the agents whose pods are on nodes that are ready, by pod; of all agents where
        nodes cannot be read.
        """
        if self.unreadable:
            return dict(self.reports)
        homes = {documents.name(pod): documents.text(pod, "spec", "nodeName") for pod in self.pods}
        ready = {name for name, node in self.nodes.items() if node.ready == "True"}
        return {pod: report for pod, report in self.reports.items() if homes.get(pod) in ready}


def read_nodes(nodes: Iterable[Document], leases: Iterable[Document]) -> dict[str, NodeState]:
    """Read the nodes from their objects and their Leases, which have the nodes' names."""
    renewals = {documents.name(lease): lease for lease in leases}
    found = {}
    for node in nodes:
        name = documents.name(node)
        ready, lease = documents.condition(node, "Ready"), renewals.get(name, {})
        found[name] = NodeState(
            name,
            ready=documents.text(ready, "status") or "Unknown",
            since=documents.moment(ready, "lastTransitionTime"),
            message=documents.text(ready, "message"),
            renewed=documents.moment(lease, "spec", "renewTime"),
            lease_seconds=documents.number(lease, "spec", "leaseDurationSeconds") or LEASE_SECONDS,
        )
    return found


def controller_of(pod: Document) -> str:
    """The uid of the controller that created a pod; empty if there is none."""
    owners = documents.items(pod, "metadata", "ownerReferences")
    return next(
        (documents.text(each, "uid") for each in owners if each.get("controller") is True), ""
    )


_FRESH_SECONDS = 15.0  # how old what was read may be
_PEERS_SECONDS = 30.0  # how old an agent's view of the rendezvous may be
_RETRY_SECONDS = 5.0  # when to look again, where nothing says so


@dataclass(frozen=True)
class PodDecision:
    """Whether a pod on a node that does not answer is given up now.

    Attributes:
        reason: a CamelCase word for why, or why not.
        message: a sentence about that.
        recover: whether it is given up now.
        retry_seconds: when to look again; None if waiting does not help.
        pod: name of the pod.
        uid: of the pod that was judged.
        node: its node.
        evidence: what was seen of the node, in sentences.
    """

    reason: str
    message: str
    recover: bool = False
    retry_seconds: float | None = _RETRY_SECONDS
    pod: str = ""
    uid: str = ""
    node: str = ""
    evidence: tuple[str, ...] = ()


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
            replace(
                result,
                pod=documents.name(pod),
                uid=documents.uid(pod),
                node=name,
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


def _judge(
    context: RecoveryContext, pod: Document, name: str, node: NodeState | None
) -> PodDecision:
    vouched = name in context.switched_off
    found = _check_ownership(context, pod)
    if found is None and not context.unreadable:
        found = _check_node(context, name, node)
    if found is None:
        found = _check_agents(context, pod) or _check_volumes(context, name)
    if found is not None:
        return found
    if vouched:
        return PodDecision("SwitchedOff", f"node {name} is said to be switched off", recover=True)
    if context.unreadable or node is None:
        return PodDecision("Unreadable", context.unreadable, retry_seconds=None)
    return _check_lease(context, node) or _judge_silence(context, node)


def _check_ownership(context: RecoveryContext, pod: Document) -> PodDecision | None:
    if controller_of(pod) in context.owners:
        return None
    message = f"the pod was not created for job {context.job}, so kdist does not change it"
    return PodDecision("NotOwned", message, retry_seconds=None)


def _check_node(context: RecoveryContext, name: str, node: NodeState | None) -> PodDecision | None:
    """What keeps the state of the nodes from being evidence."""
    if node is None:
        message = f"node {name} was deleted: Kubernetes deletes its pods by itself"
        return PodDecision("NodeDeleted", message)
    if node.ready == "True" and not _is_late(context, node):
        message = f"node {name} is ready: its kubelet answers, so the machine is not off"
        return PodDecision("NodeReady", message)
    if node.ready == "True" and name not in context.switched_off:
        message = f"node {name} is late to renew its Lease, and still counts as ready"
        return PodDecision("LeaseLate", message)
    if node.ready == "False":
        message = f"the kubelet of node {name} answers, and says that it is not ready"
        return PodDecision(
            "KubeletAnswers", f"{message}: {node.message}" if node.message else message
        )
    age = context.now - context.read_at
    if age > _FRESH_SECONDS:
        message = f"what is known of node {name} is {seconds(age)} old: it may have returned"
        return PodDecision("Stale", message)
    if name in context.switched_off:
        return None
    # perhaps it is the control plane that is cut off, or was until now, and not the node
    nodes, clock = context.nodes.values(), context.clock or 0.0
    unknown = sum(node.ready == "Unknown" for node in nodes)
    expired = sum(_overdue(node, clock) > 0 for node in nodes)
    for number, what in ((unknown, "are unknown"), (expired, "have not renewed their Leases")):
        if 2 * number > len(nodes):
            message = (
                f"{number} of {count(len(nodes), 'node')} {what}: more likely the control plane is "
                "cut off from them, or was until now"
            )
            return PodDecision("ManyNodes", message)
    return None


def _check_agents(context: RecoveryContext, pod: Document) -> PodDecision | None:
    """Agents that know that the pod lives."""
    name, address = documents.name(pod), documents.text(pod, "status", "podIP")
    if name in context.reports:
        return PodDecision("AgentAnswers", f"the agent of {name} answers, so its node is not gone")
    for observer, report in context.survivors().items():
        if report.peers and report.peers.age <= _PEERS_SECONDS and address in report.peers.heard:
            return PodDecision("AgentHeard", f"the agent of {observer} hears that of {name}")
    return None


def _check_volumes(context: RecoveryContext, name: str) -> PodDecision | None:
    """Volumes without which another pod could not start."""
    for claim, node in context.storage.pinned.items():
        if node == name:
            message = (
                f"the volume of claim {claim} is on node {name} and nowhere else, so another pod "
                "could not start: only the node's return helps"
            )
            return PodDecision("VolumeOnNode", message)
    return None


def _check_lease(context: RecoveryContext, node: NodeState) -> PodDecision | None:
    """Whether the kubelet may still be about to renew the node's Lease."""
    if node.renewed is None or context.clock is None:
        message = f"node {node.name} has no Lease that would show when its kubelet was last alive"
        return PodDecision("NoLease", message)
    left = -_overdue(node, context.clock)
    if left < 0:
        return None
    message = f"the Lease of node {node.name} has not run out yet"
    return PodDecision("LeaseHeld", message, retry_seconds=max(1.0, left))


def _judge_silence(context: RecoveryContext, node: NodeState) -> PodDecision:
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
        return PodDecision("NodeLost", message, recover=True)
    storage = context.storage
    if not (storage.kind == "shared" and storage.fenced):
        message = f"no agent of the job can tell whether node {node.name} still runs, and "
        return PodDecision("NotFenced", message + _explain_storage(context), retry_seconds=None)
    clock = context.clock or 0.0
    expired = (node.renewed or 0.0) + node.lease_seconds
    since = max(expired, clock if node.since is None else node.since)
    more = MORE_LEASES * node.lease_seconds  # until it counts as gone though no agent can tell
    left = since + more - clock
    if left >= 0:
        message = (
            f"no agent of the job can tell whether node {node.name} still runs, so kdist waits "
            f"{seconds(more)} longer"
        )
        return PodDecision("NoObserver", message, retry_seconds=max(1.0, left))
    message = (
        f"node {node.name} does not answer, and its Lease ran out more than "
        f"{seconds(more)} ago; the lock of the checkpoints keeps it from writing, should it "
        "still run"
    )
    return PodDecision("NodeLost", message, recover=True)


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


def _describe(context: RecoveryContext, pod: Document, node: NodeState) -> Iterator[str]:
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


@dataclass(frozen=True)
class HeldVolume:
    """A volume that one node at a time can mount, and which is attached to a node that is gone."""

    volume: str
    claim: str
    node: str

    def explain(self) -> str:
        """A sentence about how long pods on other nodes have to wait for it."""
        return (
            f"claim {self.claim} is attached to node {self.node}; Kubernetes detaches it by force "
            f"{seconds(FORCE_DETACH_SECONDS)} min after the pod there has ended"
        )


def find_held_volumes(
    claims: Mapping[str, Document], attachments: Iterable[Document], *, node: str
) -> list[HeldVolume]:
    """Find the volumes of these claims, by name, that only one node can mount, and that are
    attached to `node`.
    """
    attached = {
        documents.text(each, "spec", "source", "persistentVolumeName")
        for each in attachments
        if documents.text(each, "spec", "nodeName") == node
    } - {""}
    found = []
    for name, claim in claims.items():
        modes = documents.texts(claim, "spec", "accessModes")
        volume = documents.text(claim, "spec", "volumeName")
        if volume in attached and modes and all(mode in _SINGLE for mode in modes):
            found.append(HeldVolume(volume, name, node))
    return found

"""What is known of the nodes of a job: their Ready conditions and Leases, what the job's agents
report, and where its checkpoints are.

All times of nodes are in unix seconds as the cluster writes them. They are compared with each other
and never with the clock of this machine, which may be wrong: the newest Lease tells the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kdist.status import AgentStatus, documents
from kdist.status.documents import Document

LEASE_NAMESPACE: Final = "kube-node-lease"
"""Namespace of the Leases that kubelets renew."""
LEASE_SECONDS: Final = 40.0
"""The kubelet's default duration of a Lease."""


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
        """The newest renewal of any Lease, which is the cluster's time at the earliest; None
        without Leases.
        """
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

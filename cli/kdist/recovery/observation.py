"""Fetches what a decision is made from: nodes, Leases, volumes, pods, and the agents' reports.

Everything is read from the API server at this moment, and the agents are asked: a decision must not
rest on what a watch has missed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kdist.cluster import ApiError, find_makers
from kdist.errors import NotFoundError
from kdist.job.cluster.agents import Agents
from kdist.manifest import job_selector
from kdist.recovery.decision import (
    LEASE_NAMESPACE,
    HeldVolume,
    NodeState,
    RecoveryContext,
    Storage,
    find_held_volumes,
    read_nodes,
)
from kdist.status import Pod, documents, read_pod
from kdist.status.agent_status import read_reports
from kdist.status.documents import Document

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.job.cluster.applied import AppliedJob


AskAgents = Callable[[Sequence[Pod]], Mapping[str, Document]]
"""Returns the `/status` documents of those agents that answer, by pod."""
_SHARED = "ReadWriteMany"
_HOSTNAME = "kubernetes.io/hostname"


def observe(
    target: AppliedJob, *, ask: AskAgents | None = None, switched_off: Collection[str] = ()
) -> RecoveryContext:
    """Fetch what is known of a job and of its nodes, and ask its agents, by default through the API
    server's proxy. `switched_off` are nodes that a person vouches for being off.

    Raises `NotFoundError` if the job's workload does not exist, `ForeignError` if the object of its
    name belongs to something else, `KdistError` (UNREACHABLE) without an API server.
    """
    cluster = target.cluster
    read_at = time.time()
    ask = ask or Agents(cluster, namespace=target.namespace).poll
    with ThreadPoolExecutor() as pool:
        nodes_task = pool.submit(_fetch_nodes, cluster)
        owners_task = pool.submit(lambda: find_makers(cluster, target.backend, target.workload()))
        pods = cluster.list("v1", "Pod", selector=job_selector(target.name))
        nodes, unreadable = nodes_task.result()
        lost = [name for name, node in nodes.items() if node.ready != "True"]
        storage_task = pool.submit(_fetch_storage, target, [*lost, *switched_off])
        answers = ask([read_pod(pod, lost_nodes=lost) for pod in pods])
        return RecoveryContext(
            job=target.name,
            pods=pods,
            owners=owners_task.result(),
            nodes=nodes,
            reports=read_reports(answers, run_id=target.placement.run_id),
            storage=storage_task.result(),
            read_at=read_at,
            now=time.time(),
            switched_off=frozenset(switched_off),
            unreadable=unreadable,
        )


def fetch_held_volumes(target: AppliedJob, node: str) -> list[HeldVolume]:
    """The volumes of the job that a node holds, so that pods elsewhere have to wait for them; none
    if they may not be read.
    """
    cluster = target.cluster
    claims = sorted(_claims_of(target))
    try:
        found = [(name, cluster.get("v1", "PersistentVolumeClaim", name)) for name in claims]
        attachments = cluster.list("storage.k8s.io/v1", "VolumeAttachment")
    except (ApiError, NotFoundError):
        return []
    return find_held_volumes(dict(found), attachments, node=node)


def _fetch_nodes(cluster: Cluster) -> tuple[dict[str, NodeState], str]:
    """The nodes, and why they cannot be read if they cannot."""
    try:
        nodes = cluster.list("v1", "Node")
        leases = cluster.list("coordination.k8s.io/v1", "Lease", namespace=LEASE_NAMESPACE)
    except ApiError as error:
        if error.status != HTTPStatus.FORBIDDEN:
            raise
        return {}, f"nodes and their Leases show whether a node is gone, but {error.message}"
    return read_nodes(nodes, leases), ""


def _fetch_storage(target: AppliedJob, nodes: Collection[str]) -> Storage:
    """Where the checkpoints are, and which claims have a volume on one of these nodes only."""
    volumes = {name: _fetch_volume(target.cluster, name) for name in sorted(_claims_of(target))}
    pinned = {
        name: node for name, (_, volume) in volumes.items() if (node := _node_of(volume)) in nodes
    }
    fenced = target.job.spec.train is not None
    name = target.job.checkpoint_claim
    if target.uses_bucket:
        return Storage("shared", fenced, pinned=pinned)
    if not name:
        return Storage("none", fenced, pinned=pinned)
    claim, _ = volumes[name]
    if not claim:
        return Storage("unknown", fenced, name, pinned)
    modes = documents.texts(claim, "status", "accessModes") or documents.texts(
        claim, "spec", "accessModes"
    )
    return Storage("shared" if _SHARED in modes else "single", fenced, name, pinned)


def _fetch_volume(cluster: Cluster, claim: str) -> tuple[Document, Document]:
    """A claim and its volume; an empty document for what does not exist or may not be read."""
    found = cluster.find_readable("v1", "PersistentVolumeClaim", claim) or {}
    name = documents.text(found, "spec", "volumeName")
    volume = cluster.find_readable("v1", "PersistentVolume", name) if name else None
    return found, volume or {}


def _node_of(volume: Mapping[str, Any]) -> str:
    """The only node on which a volume is; empty if there are several, or all."""
    terms = documents.items(volume, "spec", "nodeAffinity", "required", "nodeSelectorTerms")
    hosts = [
        documents.texts(each, "values")
        for term in terms
        for each in documents.items(term, "matchExpressions")
        if each.get("key") == _HOSTNAME and each.get("operator") == "In"
    ]
    return hosts[0][0] if len(terms) == len(hosts) == 1 and len(hosts[0]) == 1 else ""


def _claims_of(target: AppliedJob) -> Iterator[str]:
    code, data = target.job.spec.code, target.job.spec.data
    claims = [target.job.checkpoint_claim, code and code.claim, *(each.claim for each in data)]
    yield from filter(None, claims)

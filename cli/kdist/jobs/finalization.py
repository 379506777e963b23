"""Finalizes a finished job whose workload kind cannot end by itself: scales it to zero pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist import backends
from kdist.status import OUTCOME, ExitRecord, Phase, Snapshot, documents

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_ENDLESS = "statefulset"  # the workload kind that cannot end by itself


def finalize(cluster: Cluster, snapshot: Snapshot) -> bool:
    """Scale a finished job to zero pods, and record its outcome on the workload, where the workload
    cannot end by itself. Every command that observes such a job does so.

    Returns:
        Whether the workload was changed. It is not where the user lacks the right.

    Raises:
        KdistError: the API server is unreachable (UNREACHABLE).
    """
    from kdist.cluster import ApiError, ForeignError, JobObjects, JobOwner

    status = snapshot.status
    if snapshot.resource is not None:
        return False  # the controller does
    if snapshot.backend != _ENDLESS or not status.kept_alive or not status.phase.terminal:
        return False
    if not documents.integer(snapshot.workload, "spec", "replicas"):
        return False
    record = status.exit_record or ExitRecord(
        0 if status.phase is Phase.SUCCEEDED else 1, outcome=str(status.phase).lower()
    )
    patch = {"metadata": {"annotations": {OUTCOME: record.to_text()}}, "spec": {"replicas": 0}}
    backend = backends.get(_ENDLESS)
    try:
        owner = JobOwner(snapshot.namespace or cluster.namespace, snapshot.name, _ENDLESS)
        JobObjects(cluster, owner).change(backend.api_version, backend.kind, snapshot.name, patch)
    except (ForeignError, ApiError):
        return False
    return True

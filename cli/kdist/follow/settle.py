"""Takes away the pods of work that is over, on the kind of workload that cannot end: whoever sees it does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist import backends
from kdist.status import OUTCOME, ExitRecord, Phase, Snapshot, fields

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_KIND = "statefulset"


def settle(cluster: Cluster, seen: Snapshot) -> bool:
    """Scale a parked job to zero pods and note its outcome on the workload; whether there was something to do.

    Does nothing where we may not: then somebody else will. Raises `KdistError` if the API server stays away.
    """
    from kdist.cluster import ForeignError, RefusalError

    status = seen.status
    if seen.backend != _KIND or not status.parked or not status.phase.terminal:
        return False
    if not fields.integer(seen.workload, "spec", "replicas"):
        return False
    record = status.exit_record or ExitRecord(0 if status.phase is Phase.SUCCEEDED else 1, outcome=str(status.phase).lower())
    patch = {"metadata": {"annotations": {OUTCOME: record.to_text()}}, "spec": {"replicas": 0}}
    backend = backends.get(_KIND)
    try:
        cluster.change(backend.api_version, backend.kind, seen.name, patch, job=seen.name, namespace=seen.namespace)
    except (ForeignError, RefusalError):
        return False
    return True

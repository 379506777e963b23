"""Gives up a pod whose node is gone: marks it as failed by a disruption, so that its controller
creates another one, and removes it where the new one needs its name.

Only this one pod is touched, and only as it was judged: its uid and its version are part of the
request. Should its node return, the kubelet ends the pod's containers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from kdist.backends import Backend
from kdist.cluster import ApiError, JobObjects, JobOwner
from kdist.errors import NotFoundError
from kdist.recovery.decision import PodDecision
from kdist.recovery.evidence import controller_of
from kdist.status import documents
from kdist.status.documents import Document

if TYPE_CHECKING:
    from kdist.cluster import Cluster

CONDITION: Final = "DisruptionTarget"
"""The condition of a pod that ends by no fault of its own: controllers do not count its failure."""
REASON: Final = "NodeLost"
"""Reason of the condition and of the pod's status."""


@dataclass(frozen=True)
class Replacement:
    """What was done to a pod.

    Attributes:
        pod: its name.
        marked: whether it was marked as failed.
        deleted: whether it was deleted, because the new pod needs its name or because it was being
            deleted already.
        changed: whether nothing was done, because the pod has changed or ended since it was judged.
    """

    pod: str
    marked: bool = False
    deleted: bool = False
    changed: bool = False


def replace_pod(
    cluster: Cluster,
    decision: PodDecision,
    *,
    owner: JobOwner,
    backend: Backend,
    dry_run: bool = False,
) -> Replacement:
    """Give up the pod of a decision.

    Args:
        cluster: the cluster.
        decision: the decision, which recovers the pod.
        owner: the job, with the makers of its pods.
        backend: the job's workload kind.
        dry_run: let the server check it, and change nothing.

    Raises:
        ValueError: the decision is to wait.
        ApiError: the server rejects it.
    """
    if not decision.recover:
        raise ValueError(f"{decision.pod} is not to be replaced: {decision.message}")
    try:
        pod = cluster.get("v1", "Pod", decision.pod, owner.namespace)
    except NotFoundError:
        return Replacement(decision.pod, changed=True)
    over = documents.text(pod, "status", "phase") in ("Succeeded", "Failed")
    same = documents.text(pod, "metadata", "uid") == decision.uid
    if over or not same or controller_of(pod) not in owner.makers:
        return Replacement(decision.pod, changed=True)
    objects = JobObjects(cluster, owner)
    try:
        marked = objects.change(
            "v1",
            "Pod",
            decision.pod,
            failed_status(pod, decision.message),
            known=pod,
            subresource="status",
            dry_run=dry_run,
        )
    except ApiError as error:
        if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
            raise
        return Replacement(decision.pod, changed=True)
    if not (backend.reuses_pod_names or documents.text(marked, "metadata", "deletionTimestamp")):
        return Replacement(decision.pod, marked=True)
    deleted = _delete(objects, marked, dry_run=dry_run)
    return Replacement(decision.pod, marked=True, deleted=deleted)


def failed_status(pod: Document, message: str) -> dict[str, Any]:
    """The merge patch that marks a pod as failed, for as long as it is as it was read."""
    metadata = documents.mapping(pod, "metadata")
    others = [
        each
        for each in documents.items(pod, "status", "conditions")
        if documents.text(each, "type") != CONDITION
    ]
    condition = {
        "type": CONDITION,
        "status": "True",
        "reason": REASON,
        "message": message,
        "lastTransitionTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
    return {
        "metadata": {key: metadata[key] for key in ("uid", "resourceVersion")},
        "status": {
            "phase": "Failed",
            "reason": REASON,
            "message": message,
            "conditions": [*others, condition],
        },
    }


def _delete(objects: JobObjects, pod: Mapping[str, Any], *, dry_run: bool) -> bool:
    """Delete this very pod at once: there is no kubelet that could end it first."""
    uid = documents.text(pod, "metadata", "uid")
    return objects.remove(
        "v1", "Pod", documents.name(pod), uid=uid, grace=0, dry_run=dry_run
    )  # False where another pod has its name already

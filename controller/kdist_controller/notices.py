"""Writes the events of a TrainingJob, which `kubectl describe` shows."""

from __future__ import annotations

import hashlib
import time
from http import HTTPStatus

from kdist.cluster import ApiError, Cluster
from kdist.spec import API_VERSION, KIND
from kdist.status import documents
from kdist_controller import conditions
from kdist_controller.changes import Notice
from kdist_controller.resource import Resource

COMPONENT = "kdist-controller"


def tell(cluster: Cluster, resource: Resource, notice: Notice, *, identity: str) -> None:
    """Create an event. Its name follows from `identity`, so that one told twice is one.

    Args:
        cluster: the cluster, with the namespace of the TrainingJob.
        resource: the TrainingJob.
        notice: what to tell.
        identity: what distinguishes this occasion from others with the same reason.
    """
    key = resource.key
    whole = "\0".join((resource.uid, identity, notice.reason))
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    now = conditions.format_time(time.time())
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{key.name}.{digest}", "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": key.name,
            "namespace": key.namespace,
            "uid": resource.uid,
            "resourceVersion": documents.text(resource.document, "metadata", "resourceVersion"),
        },
        "reason": notice.reason,
        "message": notice.message,
        "type": "Warning" if notice.warning else "Normal",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }
    try:
        cluster.send_create(event)
    except ApiError as error:
        if error.status != HTTPStatus.CONFLICT:
            raise

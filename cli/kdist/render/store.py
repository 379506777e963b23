"""What a job's pods need of the place where their checkpoints are: a volume, or for a bucket the
environment variables of its server and credentials and a way to it through the NetworkPolicy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kdist.render.templates import TracedValue, trace_value
from kdist.spec import (
    CHECKPOINTS_ENDPOINT,
    CHECKPOINTS_REGION,
    OBJECT_STORE_VARIABLES,
    TrainingJob,
    port_of,
)

_OPEN_PORTS: Final = (443, 6443, 8443, 16443)  # those that every job's pods may reach
_HTTP_PORT: Final = 80  # at which clouds serve the credentials of a machine
_IDENTITY_AGENT: Final = "169.254.170.23/32"  # of EKS, which serves the credentials of a pod


def list_variables(job: TrainingJob) -> Iterator[dict[str, Any]]:
    """The environment variables of the bucket. A Secret need not have all keys: which of them there
    are depends on the kind of credentials.
    """
    checkpoints = job.spec.checkpoints
    if checkpoints is None:
        return
    for variable, name in ((CHECKPOINTS_ENDPOINT, "endpoint"), (CHECKPOINTS_REGION, "region")):
        if (value := getattr(checkpoints, name)) is not None:
            found = {"name": variable, "value": value}
            yield trace_value(found, f"spec.checkpoints.{name}")
    if checkpoints.secret is not None:
        for key in OBJECT_STORE_VARIABLES[checkpoints.scheme]:
            reference = {"name": checkpoints.secret, "key": key, "optional": True}
            found = {"name": key, "valueFrom": {"secretKeyRef": reference}}
            yield trace_value(found, "spec.checkpoints.secret")


def find_access(job: TrainingJob) -> dict[str, Any]:
    """What gives the pods access: `is_mounted` if it is a volume, and what the NetworkPolicy has to
    allow for a bucket besides what every job may reach: `port` of the server, `is_http` if that is
    one at which link-local addresses must stay closed, and `agent`, the address of an agent that
    gives a pod the credentials of its service account.
    """
    checkpoints = job.spec.checkpoints
    found: dict[str, Any] = {
        "is_mounted": checkpoints is not None
        and checkpoints.in_cluster
        and checkpoints.bucket is None,
        "port": None,
        "is_http": False,
        "agent": None,
    }
    if checkpoints is None or checkpoints.bucket is None:
        return found
    if checkpoints.endpoint is not None:
        port = port_of(checkpoints.endpoint)
        if port not in _OPEN_PORTS:
            found["port"] = TracedValue(port, "spec.checkpoints.endpoint")
            found["is_http"] = port == _HTTP_PORT
    elif checkpoints.scheme == "s3" and checkpoints.secret is None:
        found["agent"] = TracedValue(_IDENTITY_AGENT, "spec.checkpoints.url")
    return found

"""What a job's pods need of the place where their checkpoints are: a volume, or for a bucket the
environment variables of its server and credentials; and the way through the NetworkPolicy to the
servers of checkpoints, data and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kdist.render.templates import TracedValue, trace_value
from kdist.spec import (
    CHECKPOINTS_ENDPOINT,
    CHECKPOINTS_REGION,
    CREDENTIAL_VARIABLES,
    TrainingJob,
    list_sources,
    port_of,
)

_OPEN_PORTS: Final = (443, 6443, 8443, 16443)  # those that every job's pods may reach
_HTTP_PORT: Final = 80  # at which clouds serve the credentials of a machine
_IDENTITY_AGENT: Final = "169.254.170.23/32"  # of EKS, which serves the credentials of a pod


def list_variables(job: TrainingJob) -> Iterator[dict[str, Any]]:
    """The environment variables of the bucket with checkpoints."""
    checkpoints = job.spec.checkpoints
    if checkpoints is None:
        return
    for variable, name in ((CHECKPOINTS_ENDPOINT, "endpoint"), (CHECKPOINTS_REGION, "region")):
        if (value := getattr(checkpoints, name)) is not None:
            found = {"name": variable, "value": value}
            yield trace_value(found, f"spec.checkpoints.{name}")
    if checkpoints.secret is not None:
        yield from list_credentials(checkpoints.scheme, checkpoints.secret, "spec.checkpoints")


def list_credentials(scheme: str, secret: str, section: str) -> Iterator[dict[str, Any]]:
    """The environment variables with credentials from a Secret that a section of the job names. The
    Secret need not have all keys: which of them there are depends on the kind of credentials.
    """
    for key in CREDENTIAL_VARIABLES[scheme]:
        reference = {"name": secret, "key": key, "optional": True}
        found = {"name": key, "valueFrom": {"secretKeyRef": reference}}
        yield trace_value(found, f"{section}.secret")


def is_mounted(job: TrainingJob) -> bool:
    """Whether the pods mount a volume for their checkpoints."""
    checkpoints = job.spec.checkpoints
    return checkpoints is not None and checkpoints.in_cluster and checkpoints.bucket is None


def find_access(job: TrainingJob) -> dict[str, Any]:
    """What the pods need of the place where their checkpoints are and of the servers that they
    fetch from: `is_mounted` if they mount a volume for checkpoints, and what the NetworkPolicy has
    to allow besides what every job may reach: the `ports` of servers, `is_http` for one at which
    link-local addresses must stay closed, and `agent`, the address of an agent that gives a pod the
    credentials of its service account.
    """
    ports: dict[int, str] = {}
    agent = None
    for field, endpoint, needs_identity in _list_servers(job):
        if endpoint is not None:
            ports.setdefault(port_of(endpoint), field)
        elif needs_identity and agent is None:
            agent = TracedValue(_IDENTITY_AGENT, field)
    return {
        "is_mounted": is_mounted(job),
        "ports": [
            {"port": TracedValue(port, field), "is_http": port == _HTTP_PORT}
            for port, field in ports.items()
            if port not in _OPEN_PORTS
        ],
        "agent": agent,
    }


def _list_servers(job: TrainingJob) -> Iterator[tuple[str, str | None, bool]]:
    """For each place: the field that names it, the address of its server, None for that of a cloud,
    and whether it is used with the pods' own identity.
    """
    checkpoints = job.spec.checkpoints
    if checkpoints is not None and checkpoints.bucket is not None:
        field = "spec.checkpoints." + ("url" if checkpoints.endpoint is None else "endpoint")
        identity = checkpoints.scheme == "s3" and checkpoints.secret is None
        yield field, checkpoints.endpoint, identity
    for source in list_sources(job.spec):
        field = f"{source.field}." + ("url" if source.endpoint is None else "endpoint")
        yield field, source.server, source.scheme == "s3" and source.secret is None

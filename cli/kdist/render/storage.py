"""What a job's pods need to reach their checkpoints: a volume, or for a bucket the
environment variables of its server and credentials; and the way through the NetworkPolicy to the
servers of checkpoints, data and weights.

Also the init containers that fetch data and weights by URL before a pod's agent starts: their
arguments and environment, and what the NetworkPolicy has to allow for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kdist.render.overlay import OVERLAY, plain
from kdist.render.templates import TracedValue, trace_value
from kdist.spec import (
    ACCESS_MODE,
    CHECKPOINTS_ENDPOINT,
    CHECKPOINTS_REGION,
    CREDENTIAL_VARIABLES,
    TrainingJob,
    count_bytes,
    list_sources,
    port_of,
)
from kdist.status import FETCHER

_OPEN_PORTS: Final = (443, 6443, 8443, 16443)
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
    to allow: the `open_ports` that every job's pods may reach, the further `ports` of servers,
    `is_http` for one at which link-local addresses must stay closed, and `agent`, the address of an
    agent that gives a pod the credentials of its service account. `access_mode` is that of a claim
    that is made for the checkpoints.
    """
    ports: dict[int, str] = {}
    agent = None
    for field, endpoint, needs_identity in _list_servers(job):
        if endpoint is not None:
            ports.setdefault(port_of(endpoint), field)
        elif needs_identity and agent is None:
            agent = TracedValue(_IDENTITY_AGENT, field)
    mode = None if job.spec.checkpoints is None else job.spec.checkpoints.access_mode
    return {
        "is_mounted": is_mounted(job),
        "access_mode": TracedValue(mode or ACCESS_MODE, "spec.checkpoints.accessMode"),
        "open_ports": _OPEN_PORTS,
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
    if job.spec.install is not None and job.spec.install.index is not None:
        yield "spec.install.index", job.spec.install.index, False
    for source in list_sources(job.spec):
        field = f"{source.field}." + ("url" if source.endpoint is None else "endpoint")
        yield field, source.server, source.scheme == "s3" and source.secret is None


_SHARED: Final = ("cpu", "memory", "ephemeral-storage")  # a fetch needs no GPU
_MEBI: Final = 1024 * 1024


def fit(size: str) -> str:
    """Room for so many bytes, and a sixteenth for what files take up beyond them: the kubelet
    evicts a pod that exceeds it, which would then fetch everything again.
    """
    return f"{-(-count_bytes(size) * 17 // (16 * _MEBI))}Mi"


def list_fetches(
    job: TrainingJob, *, literal: Callable[[str], str], storage: Callable[[str], str]
) -> list[dict[str, Any]]:
    """The values of the template for each source.

    Args:
        job: the job.
        literal: escapes an argument of a container.
        storage: normalizes a quantity of bytes.
    """
    return [
        {
            "name": source.name,
            "field": source.field,
            "arguments": [
                TracedValue(literal(argument), f"{source.field}.{name}")
                for name, argument in source.arguments()
            ],
            "variables": list(list_credentials(source.scheme, source.secret, source.field))
            if source.secret is not None
            else [],
            "size": TracedValue(storage(fit(source.size)), f"{source.field}.size"),
        }
        for source in list_sources(job.spec)
        if source.mount
    ]


def follow_training(pod: Mapping[str, Any], container: str, overlay: Mapping[str, Any]) -> None:
    """Change the init containers that fetch as the overlay has changed the training's container:
    they get its CPU and memory, so that the pod requests no more, and what it has been given in
    variables and mounts, such as a company's certificate authority. What the overlay says of an
    init container itself stays.

    Args:
        pod: the pod template with the overlay merged into it; is changed.
        container: name of the training's container.
        overlay: `spec.podTemplate`.
    """
    spec = pod["spec"]
    (trainer,) = [each for each in spec["containers"] if each["name"] == container]
    own = {
        str(each.get("name"))
        for each in (overlay.get("spec") or {}).get("initContainers") or ()
        if "resources" in each
    }
    for each in spec.get("initContainers") or ():
        if not str(each["name"]).startswith(FETCHER):
            continue
        for field, key in (("env", "name"), ("volumeMounts", "mountPath")):
            known = {plain(one[key]) for one in each.get(field) or ()}
            each[field] = [
                *(each.get(field) or ()),
                *(
                    one
                    for one in trainer.get(field) or ()
                    if isinstance(one[key], TracedValue)
                    and one[key].source == OVERLAY
                    and plain(one[key]) not in known
                ),
            ]
        if each["name"] not in own:
            each["resources"] = {
                kind: {name: amount for name, amount in found.items() if name in _SHARED}
                for kind, found in (trainer.get("resources") or {}).items()
                if kind in ("requests", "limits")
            }

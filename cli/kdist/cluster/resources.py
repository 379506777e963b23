"""API paths of Kubernetes resources: API version, kind, namespace and name become a path. Also the
kinds that a cluster serves.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from kdist.cluster.api_errors import ApiError
from kdist.cluster.transport import ApiRequest, Transport
from kdist.errors import KdistError

# Kinds that live outside namespaces; all others are asked for in one.
CLUSTER_SCOPED = frozenset(
    {
        "APIService",
        "ClusterQueue",
        "ClusterRole",
        "ClusterRoleBinding",
        "ClusterTrainingRuntime",
        "CustomResourceDefinition",
        "MutatingWebhookConfiguration",
        "Namespace",
        "Node",
        "PersistentVolume",
        "PriorityClass",
        "ResourceFlavor",
        "RuntimeClass",
        "SelfSubjectAccessReview",
        "SelfSubjectReview",
        "SelfSubjectRulesReview",
        "StorageClass",
        "ValidatingWebhookConfiguration",
        "VolumeAttachment",
        "WorkloadPriorityClass",
    }
)


def plural(kind: str) -> str:
    """The resource's name in a path: `NetworkPolicy` is `networkpolicies`. The rule is the API
    machinery's own.
    """
    name = kind.lower()
    if name == "endpoints":
        return name
    if name.endswith("y") and name[-2:-1] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch", "sh")) else f"{name}s"


def group(api_version: str) -> str:
    """API group of `batch/v1`: `batch`; the core's is ""."""
    return api_version.rpartition("/")[0]


def path(
    api_version: str,
    kind: str,
    *,
    namespace: str | None = None,
    name: str = "",
    subresource: str = "",
) -> str:
    """Path of an object, or of all objects of the kind when `name` is empty. Without a namespace:
    of all namespaces.
    """
    parts = ["apis" if "/" in api_version else "api", api_version]
    if namespace and kind not in CLUSTER_SCOPED:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(plural(kind))
    if name:
        parts.append(quote(name, safe=""))
    if subresource:
        parts.append(subresource)
    return "/" + "/".join(parts)


def named(api_version: str, kind: str, subresource: str = "") -> str:
    """The kind, or a part of it, as people and RBAC rules write it: `jobs.batch`, `pods/exec`."""
    part = f"/{subresource}" if subresource else ""
    return ".".join(each for each in (plural(kind), group(api_version)) if each) + part


_AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def kinds(transport: Transport) -> set[tuple[str, str]]:
    """Every (API version, kind), by two requests, each of which is answered for all groups."""
    found: set[tuple[str, str]] = set()
    for root in ("/api", "/apis"):
        answer = _ask(transport, root, accept=_AGGREGATED)
        if "items" not in answer:
            raise KdistError(f"the API server's discovery document at {root} has no items")
        for group in answer["items"] or []:
            name = (group.get("metadata") or {}).get("name") or ""
            for version in group.get("versions") or []:
                api_version = f"{name}/{version['version']}" if name else version["version"]
                for resource in version.get("resources") or []:
                    if kind := (resource.get("responseKind") or {}).get("kind"):
                        found.add((api_version, kind))
    return found


def is_served(transport: Transport, api_version: str, kind: str) -> bool:
    """Whether there is this kind, by one request for its group's version."""
    root = "/apis" if "/" in api_version else "/api"
    try:
        listed = _ask(transport, f"{root}/{api_version}").get("resources") or []
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return False
    return any(each.get("kind") == kind for each in listed)


def _ask(transport: Transport, path: str, *, accept: str = "application/json") -> dict[str, Any]:
    return transport.send(ApiRequest("GET", path, f"get {path}", accept=accept)).document()

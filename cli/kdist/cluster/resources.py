"""Where an object lives on the API server: API version, kind, namespace and name become a path. Pure."""

from __future__ import annotations

from urllib.parse import quote

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
        "WorkloadPriorityClass",
    }
)


def plural(kind: str) -> str:
    """The resource's name in a path: `NetworkPolicy` is `networkpolicies`. The rule is the API machinery's own."""
    name = kind.lower()
    if name == "endpoints":
        return name
    if name.endswith("y") and name[-2:-1] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith(("s", "x", "ch", "sh")) else f"{name}s"


def group(api_version: str) -> str:
    """API group of `batch/v1`: `batch`; the core's is ""."""
    return api_version.rpartition("/")[0]


def path(api_version: str, kind: str, *, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
    """Path of an object, or of all objects of the kind when `name` is empty. Without a namespace: of all namespaces."""
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

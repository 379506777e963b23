"""Who we are to the cluster, and what kdist's commands may do in our name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from kdist import backends
from kdist.doctor.finding import Finding, missing, note, ok

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_RBAC = "rbac.authorization.k8s.io/v1"
_THREADS = 8


class Right(NamedTuple):
    """A verb on a kind, or on a part of it."""

    verb: str
    api_version: str
    kind: str
    subresource: str = ""

    def __str__(self) -> str:
        from kdist.cluster import resources

        name = resources.named(self.api_version, self.kind)
        return f"{self.verb} {name}{f'/{self.subresource}' if self.subresource else ''}"


def _on(verbs: str, api_version: str, *kinds: str) -> list[Right]:
    return [Right(verb, api_version, kind) for verb in verbs.split() for kind in kinds]


_ALL = "get create patch delete list"
_SEND = [
    *_on(_ALL, "v1", "ConfigMap", "Service", "ServiceAccount", "PersistentVolumeClaim"),
    *_on(_ALL, "networking.k8s.io/v1", "NetworkPolicy"),
    *_on(_ALL, "policy/v1", "PodDisruptionBudget"),
]
# The group of commands, what they need, and what is lost without it.
GROUPS: tuple[tuple[str, list[Right], str], ...] = (
    ("watch: get, status, events, wait, why", [*_on("get list watch", "v1", "Pod"), *_on("list", "v1", "Event")], ""),
    ("logs", [Right("get", "v1", "Pod", "log")], ""),
    ("metrics and live status", [Right("get", "v1", "Pod", "proxy")], "step and loss are asked for over a forwarded port"),
    ("exec and port-forward", [Right("create", "v1", "Pod", part) for part in ("exec", "portforward")], "no shell in a pod"),
    ("restart and delete of pods", _on("create delete", "v1", "Pod"), "a pod on a lost node cannot be replaced from here"),
)


def check_identity(cluster: Cluster) -> Iterator[Finding]:
    """The name that the cluster knows us by."""
    name = cluster.whoami()
    yield ok("you", f"{name or 'known to the server'}, namespace {cluster.namespace}")


def check_rights(cluster: Cluster) -> Iterator[Finding]:
    """Each group of commands with the verbs that it lacks."""
    served = cluster.kinds()
    workloads = [backends.get(name) for name in backends.NAMES]
    kinds = [(each.api_version, each.kind) for each in workloads if (each.api_version, each.kind) in served]
    groups = [
        ("apply and delete", [*_SEND], ""),
        *((f"jobs as {kind}", _on(_ALL, version, kind), "other kinds may do") for version, kind in kinds),
        ("rendezvous by the API server", _on("create patch delete", _RBAC, "Role", "RoleBinding"),
         "jobs use rendezvous c10d: losing pod 0 restarts the pods, which resume"),
        *GROUPS,
    ]  # fmt: skip
    with ThreadPoolExecutor(_THREADS) as pool:
        answers = [(name, pool.map(lambda right: _may(cluster, right), rights), without) for name, rights, without in groups]
        lacking = [(name, [str(right) for right, may in found if not may], without) for name, found, without in answers]
    if not any(verbs for name, verbs, _ in lacking if name.startswith("jobs as")):
        yield ok("rights: jobs", f"every verb on {', '.join(kind for _, kind in kinds)}")
        lacking = [each for each in lacking if not each[0].startswith("jobs as")]
    for name, verbs, without in lacking:
        title = f"rights: {name}"
        fix = f"ask an admin for a role with: {', '.join(verbs)} (in namespace {cluster.namespace})"
        if not verbs:
            yield ok(title, "all verbs")
        elif without:
            yield note(title, f"not allowed: {', '.join(verbs)}; {without}", fix)
        else:
            yield missing(title, f"not allowed: {', '.join(verbs)}", fix)


def _may(cluster: Cluster, right: Right) -> tuple[Right, bool]:
    return right, cluster.can_i(right.verb, right.api_version, right.kind, subresource=right.subresource)

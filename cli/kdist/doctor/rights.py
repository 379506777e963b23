"""Who we are to the cluster, and what kdist's commands may do in our name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdist import backends, rights
from kdist.doctor.finding import Finding, missing, note, ok

if TYPE_CHECKING:
    from kdist.cluster import Cluster


def check_identity(cluster: Cluster) -> Iterator[Finding]:
    """The name that the cluster knows us by."""
    name = cluster.whoami()
    yield ok("you", f"{name or 'known to the server'}, namespace {cluster.namespace}")


def check_rights(cluster: Cluster) -> Iterator[Finding]:
    """Each group of commands with the verbs that it lacks."""
    served = cluster.kinds()
    groups: list[tuple[str, list[rights.Right], str]] = [
        (need.commands, [each for each in need.rights if _is_served(each, served)], need.without) for need in rights.NEEDS
    ]
    verbs = list(dict.fromkeys(verb for need in rights.NEEDS for verb in need.workload.split()))
    for name in backends.NAMES:
        kind = (backends.get(name).api_version, backends.get(name).kind)
        if kind in served:
            groups.append((f"jobs as {kind[1]}", [rights.Right(verb, *kind) for verb in verbs], "other kinds may do"))
    gone = set(rights.find_missing(cluster, [right for _, wanted, _ in groups for right in wanted]))
    lacking = [(name, [str(each) for each in wanted if each in gone], without) for name, wanted, without in groups if wanted]
    jobs = [each for each in lacking if each[0].startswith("jobs as")]
    if not any(verbs for _, verbs, _ in jobs):
        yield ok("rights: jobs", f"every verb on {', '.join(name.removeprefix('jobs as ') for name, _, _ in jobs)}")
        lacking = [each for each in lacking if each not in jobs]
    for name, found, without in lacking:
        title = f"rights: {name}"
        fix = rights.advise(found, cluster.namespace)
        if not found:
            yield ok(title, "all verbs")
        elif without:
            yield note(title, f"not allowed: {', '.join(found)}; {without}", fix)
        else:
            yield missing(title, f"not allowed: {', '.join(found)}", fix)


def _is_served(right: rights.Right, served: set[tuple[str, str]]) -> bool:
    """Whether the cluster has what the right is about, in whichever version; what every cluster has is not looked up."""
    group = right.api_version.rpartition("/")[0]
    return (
        "." not in group
        or (group.endswith(".k8s.io") and not group.endswith("x-k8s.io"))
        or any(kind == right.kind and version.startswith(f"{group}/") for version, kind in served)
    )

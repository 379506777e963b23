"""A job leaves the cluster: its workload first, and when its pods have saved and gone, all that they leaned on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kdist import backends
from kdist.errors import Code, KdistError, NotFoundError
from kdist.manifest import Manifest, sort

if TYPE_CHECKING:
    from kdist.cluster import Cluster

CLAIM = "PersistentVolumeClaim"
_RBAC = "rbac.authorization.k8s.io/v1"
# What a job has beside its workload; pods and what controllers make go with the workload.
BESIDE = (
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("v1", CLAIM),
    (_RBAC, "Role"),
    (_RBAC, "RoleBinding"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
)
_POLL_SECONDS = 0.5
OPTIONAL = frozenset({"Role", "RoleBinding"})


def workload_kinds() -> list[tuple[str, str]]:
    """(API version, kind) of every workload kind that kdist renders."""
    return [(backends.get(name).api_version, backends.get(name).kind) for name in backends.NAMES]


def find_objects(cluster: Cluster, name: str) -> list[Manifest]:
    """All objects of the job that kdist made, in the order of taking them away; those that belong to another go with it."""
    from kdist.cluster import RefusalError

    found = []
    for api_version, kind in (*BESIDE, *workload_kinds()):
        try:
            listed = cluster.list(api_version, kind, selector=f"kdist.dev/job={name},app.kubernetes.io/managed-by=kdist")
        except NotFoundError:
            continue  # the cluster has no such kind
        except RefusalError as error:
            if error.status == 403 and kind in OPTIONAL:
                continue  # who may not see roles has not made any
            raise
        found += [Manifest(each) for each in listed if not each["metadata"].get("ownerReferences")]
    return sort(found)[::-1]


def split(objects: Iterable[Manifest]) -> tuple[list[Manifest], list[Manifest]]:
    """(workloads, all others), each in its order."""
    kinds = {kind for _, kind in workload_kinds()}
    workloads: list[Manifest] = []
    others: list[Manifest] = []
    for each in objects:
        (workloads if each.kind in kinds else others).append(each)
    return workloads, others


def remove(
    cluster: Cluster,
    name: str,
    objects: Iterable[Manifest],
    *,
    dry_run: bool = False,
    grace: int | None = None,
    wait: float | None,
) -> Iterator[Manifest]:
    """Delete the objects, each given back as it goes. The rest waits up to `wait` seconds for the pods; None: not at all.

    Pods that end save what they know, and need the rendezvous for it. Raises `KdistError` with code TIMEOUT if they stay.
    """
    workloads, others = split(objects)
    for each in workloads:
        cluster.delete(each.api_version, each.kind, each.name, dry_run=dry_run)
        yield each
    if grace is not None and not dry_run:  # the grace of pods that go with their workload is otherwise their own
        for pod in cluster.list("v1", "Pod", selector=f"kdist.dev/job={name}"):
            cluster.delete("v1", "Pod", pod["metadata"]["name"], grace=grace)
    if wait is not None and not dry_run:
        wait_for_pods(cluster, name, timeout=wait)
    for each in others:
        cluster.delete(each.api_version, each.kind, each.name, dry_run=dry_run)
        yield each


def wait_for_pods(cluster: Cluster, name: str, *, timeout: float) -> None:
    """Return when no pod of the job is left. Raises `KdistError` with code TIMEOUT, and the pods that stay."""
    end = time.monotonic() + timeout
    while left := cluster.list("v1", "Pod", selector=f"kdist.dev/job={name}"):
        if time.monotonic() >= end:
            break
        time.sleep(_POLL_SECONDS)
    else:
        return
    nodes = sorted({str((pod.get("spec") or {}).get("nodeName") or "no node") for pod in left})
    names = ", ".join(sorted(pod["metadata"]["name"] for pod in left))
    raise KdistError(
        f"{name} still has pods after {timeout:.0f} s: {names} (on {', '.join(nodes)})",
        hint="a node that is lost keeps its pods: delete the node, or kubectl delete pod --force",
        next_command=f"kdist why {name}",
        code=Code.TIMEOUT,
    )

"""Deletes a job's objects: those that a new version of the job no longer has (`prune`), or all of
them (`remove`). Only objects with the job's owner annotation are deleted.

`remove` deletes the workload first and the other objects when its pods have ended. `prune` never
deletes a volume claim.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kdist import backends, rbac
from kdist.backends import is_made_for
from kdist.deploy.dependents import BESIDE, CLAIM, RUNTIME, drop_owner, find_others, workload_kinds
from kdist.deploy.plan import Plan
from kdist.errors import Code, KdistError, NotFoundError
from kdist.manifest import Manifest, find_owner, sort
from kdist.status import BACKEND
from kdist.status.documents import annotation

if TYPE_CHECKING:
    from kdist.cluster import Cluster

# a runtime goes with its TrainJob
_KINDS = tuple(each for each in BESIDE if each[1] not in (CLAIM, RUNTIME))
# No pod notices that these go; all else stays as long as pods live that were started with it.
_UNNOTICED = frozenset({"NetworkPolicy", "PodDisruptionBudget"})


def find_leftovers(cluster: Cluster, plan: Plan) -> list[Manifest]:
    """Objects of the job that the plan does not have any more, in the order of taking them away.

    What the caller may not list stays, and so does what pods lean on that are still there.
    """
    if not plan.exists:
        return []
    name = plan.job.metadata.name
    planned = {(each.kind, each.name) for each in plan.manifests}
    with ThreadPoolExecutor(len(_KINDS)) as pool:
        listed = [
            each
            for found in pool.map(lambda kind: _list(cluster, kind[0], kind[1], name), _KINDS)
            for each in found
        ]
    left = [
        each
        for each in map(Manifest, listed)
        if (each.kind, each.name) not in planned and _is_ours(each.document, name)
    ]
    if not left:
        return []
    pods = [
        pod for pod in cluster.list("v1", "Pod", selector=f"kdist.dev/job={name}") if _lives(pod)
    ]
    sent = json.dumps([each.document for each in plan.manifests])
    gone = [
        each
        for each in left
        if not (each.kind == "ConfigMap" and f'"{each.name}"' in sent) and not _leans(pods, each)
    ]
    return sort(gone)[::-1]


def prune(cluster: Cluster, plan: Plan, *, dry_run: bool = False) -> Iterator[Manifest]:
    """Delete the leftovers, each given back as it goes. Raises `ApiError` where we may not."""
    leftovers = find_leftovers(cluster, plan)
    if leftovers and not dry_run:
        rbac.require(cluster, rbac.to_delete(leftovers))
    for each in leftovers:
        if cluster.remove(
            each.api_version, each.kind, each.name, job=plan.job.metadata.name, dry_run=dry_run
        ):
            yield each


def _list(cluster: Cluster, api_version: str, kind: str, name: str) -> list[dict[str, Any]]:
    from kdist.cluster import ApiError

    try:
        return cluster.list(
            api_version, kind, selector=f"kdist.dev/job={name},app.kubernetes.io/managed-by=kdist"
        )
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise


def _is_ours(document: dict[str, Any], name: str) -> bool:
    """Whether it was made for the job, which a label alone does not say, and nothing but its
    workload owns it.
    """
    return find_owner(document) == name and not find_others(document, name)


def _lives(pod: dict[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _leans(pods: Sequence[dict[str, Any]], manifest: Manifest) -> bool:
    """Whether one of the pods would miss it."""
    if manifest.kind in _UNNOTICED:
        return False
    if manifest.document.get("immutable"):  # code, which pods mount
        return any(manifest.name in _mounted(pod) for pod in pods)
    return bool(pods)


def _mounted(pod: dict[str, Any]) -> Iterator[str]:
    """Names of the ConfigMaps in the pod's volumes."""
    for volume in (pod.get("spec") or {}).get("volumes") or []:
        sources = [volume, *((volume.get("projected") or {}).get("sources") or [])]
        yield from (str((each.get("configMap") or {}).get("name")) for each in sources)


_POLL_SECONDS = 0.5
# Names that a job gives beside its own.
_DERIVED = (("ConfigMap", "-rendezvous"), (CLAIM, "-checkpoints"))


def find_objects(cluster: Cluster, name: str) -> tuple[list[Manifest], list[Manifest]]:
    """(the job's objects, others' that bear its label or a name that it gives), in the order of
    taking them away.

    What belongs to an object of somebody else's goes with that one, as a TrainJob's runtime goes
    with it; both are left out.
    """
    own = _find_backend(cluster, name)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(
            lambda kind: list(_look(cluster, kind[0], kind[1], name, own)),
            (*BESIDE, *workload_kinds()),
        )
        seen = [Manifest(each) for listed in found for each in listed]
    ours = [each for each in seen if find_owner(each.document) == name]
    foreign = [
        each
        for each in seen
        if each not in ours and not each.document["metadata"].get("ownerReferences")
    ]
    return sort(each for each in ours if not _goes_by_itself(each, name))[::-1], sort(foreign)[::-1]


def _goes_by_itself(manifest: Manifest, name: str) -> bool:
    """Whether another object's end is its end too. A runtime must outlive its TrainJob, which takes
    a while to go.
    """
    if manifest.kind == RUNTIME:
        return bool(manifest.document["metadata"].get("ownerReferences"))
    return bool(find_others(manifest.document, name))


def _look(
    cluster: Cluster, api_version: str, kind: str, name: str, own: str
) -> Iterator[dict[str, Any]]:
    """The objects of a kind that bear the job's label, and those of the names that it gives."""
    from kdist.cluster import ApiError

    try:
        listed = cluster.list(api_version, kind, selector=f"kdist.dev/job={name}")
    except NotFoundError:
        return  # the cluster has no such kind
    except ApiError as error:
        if error.status == 403 and kind not in ("ConfigMap", own):
            return  # who may not see what there is of a kind has not made any
        raise
    yield from listed
    names = {each["metadata"]["name"] for each in listed}
    for given in (name, *(f"{name}{suffix}" for of, suffix in _DERIVED if of == kind)):
        if given in names:
            continue
        try:
            yield cluster.get(api_version, kind, given)
        except NotFoundError:
            continue
        except ApiError as error:
            if error.status != 403:
                raise


def _find_backend(cluster: Cluster, name: str) -> str:
    """The kind of the job's workload; empty where its ConfigMap does not tell."""
    try:
        found = annotation(cluster.get("v1", "ConfigMap", name), BACKEND)
    except NotFoundError:
        return ""
    return backends.get(found).kind if found in backends.NAMES else ""


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
    """Delete the objects, each given back as it goes. The rest waits up to `wait` seconds for the
    pods; None: not at all.

    Pods that end save what they know, and need the rendezvous for it. Raises `KdistError` with code
    TIMEOUT if they stay.
    """
    workloads, others = split(objects)
    if not dry_run:
        wanted = [
            *rbac.to_delete([*workloads, *others]),
            *rbac.on_pods("delete" if grace is not None else ""),
        ]
        rbac.require(cluster, wanted)
    if workloads and wait is not None and not dry_run:
        # or it would go at once, and pods that save meet by it
        drop_owner(cluster, name, but=RUNTIME)
    for each in workloads:
        cluster.remove(each.api_version, each.kind, each.name, job=name, dry_run=dry_run)
        yield each
    # the grace of pods that go with their workload is otherwise their own
    if grace is not None and not dry_run:
        for pod in find_pods(cluster, name):
            cluster.delete("v1", "Pod", pod["metadata"]["name"], grace=grace)
    if wait is not None and not dry_run:
        wait_for_pods(cluster, name, timeout=wait)
    for each in others:
        cluster.remove(each.api_version, each.kind, each.name, job=name, dry_run=dry_run)
        yield each


def find_pods(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """The pods that the job's workload made: a label alone makes no pod the job's."""
    return [
        pod
        for pod in cluster.list("v1", "Pod", selector=f"kdist.dev/job={name}")
        if is_made_for(pod, name)
    ]


def wait_for_pods(cluster: Cluster, name: str, *, timeout: float) -> None:
    """Return when no pod of the job is left. Raises `KdistError` with code TIMEOUT, and the pods
    that stay.
    """
    end = time.monotonic() + timeout
    while left := find_pods(cluster, name):
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
        next_command=f"kdist why {name} -n {cluster.namespace}",
        code=Code.TIMEOUT,
    )

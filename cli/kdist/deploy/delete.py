"""Deletes a job's objects: those that a new version of the job no longer has (`prune`), those that
a failed apply has created (`undo`), or all of them (`remove`). Only objects with the job's owner
annotation are deleted.

`remove` deletes the workload first and the other objects when its pods have ended. `prune` never
deletes a volume claim.

`adopt` makes the workload the owner of the job's other objects, so that the garbage collector
deletes them once the workload is gone, by its TTL or by hand. Two objects are not owned by it and
stay. The job's ConfigMap contains the job and its run, so that applying it again
resumes that run; the claim contains the checkpoints and the ledger, which counts generations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kdist import backends, rbac
from kdist.backends import CLAIM, DEPENDENT_KINDS, RUNTIME, is_made_for, workload_kinds
from kdist.deploy.plan import ApplyResult, Plan, objects_of
from kdist.errors import Code, KdistError, NotFoundError
from kdist.manifest import (
    MANAGED_BY,
    RENDEZVOUS_SUFFIX,
    ForeignError,
    Manifest,
    find_owner,
    job_selector,
    refer_to,
    sort,
)
from kdist.status import BACKEND
from kdist.status.documents import annotation, uid
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.cluster import Cluster, JobObjects


Reference = dict[str, Any]


def find_others(document: Mapping[str, Any], name: str) -> list[Reference]:
    """The owners of an object other than the job's current or a previous workload."""
    return [
        each
        for each in _references(document)
        if backends.find(each.get("apiVersion"), each.get("kind")) is None or each["name"] != name
    ]


def adopt(cluster: Cluster, name: str, workload: Mapping[str, Any]) -> list[str]:
    """Make the workload the owner of the job's dependent objects; returns the titles of those for
    which the permission is missing.
    """
    wanted = refer_to(workload)
    found = [each for each in _find(cluster, name) if wanted not in _references(each.document)]
    return _change(cluster, name, found, lambda others: [*others, wanted])


def drop_owner(cluster: Cluster, name: str, *, but: str = "") -> None:
    """Remove the workload as owner of the job's objects, so that they outlive it. Objects of kind
    `but` stay owned.
    """
    found = [
        each
        for each in _find(cluster, name)
        if each.kind != but and find_others(each.document, name) != _references(each.document)
    ]
    _change(cluster, name, found, lambda others: others or None)


def _references(document: Mapping[str, Any]) -> list[Reference]:
    return list(document["metadata"].get("ownerReferences") or [])


def _find(cluster: Cluster, name: str) -> list[Manifest]:
    """Metadata of the job's objects that its workload owns or should own, as far as they may be
    listed.
    """
    kinds = [each for each in DEPENDENT_KINDS if each[1] != CLAIM]
    ours = _list(cluster, name, kinds, selector=job_selector(name), metadata_only=True)
    return [each for each in ours if (each.kind, each.name) != ("ConfigMap", name)]


def _list(
    cluster: Cluster, name: str, kinds: Sequence[tuple[str, str]], **how: Any
) -> list[Manifest]:
    """The job's objects of these kinds, as far as they may be listed."""
    fetch = partial(cluster.list_readable, **how)
    with ThreadPoolExecutor(len(kinds)) as pool:
        listed = [
            Manifest(each) for found in pool.map(fetch, *zip(*kinds, strict=True)) for each in found
        ]
    return [each for each in listed if find_owner(each.document) == name]


def _change(
    cluster: Cluster,
    name: str,
    objects: Iterable[Manifest],
    owners: Callable[[list[Reference]], list[Reference] | None],
) -> list[str]:
    """Set the owners of objects, computed from those that others have set; returns the titles of
    objects for which the permission is missing.
    """

    def change(each: Manifest) -> str:
        from kdist.cluster import ApiError

        body = {"metadata": {"ownerReferences": owners(find_others(each.document, name))}}
        try:
            objects_of(cluster, name).change(each.api_version, each.kind, each.name, body)
        except NotFoundError:
            return ""  # deleted meanwhile
        except ApiError as error:
            if error.status != 403:
                raise
            return each.title
        return ""

    found = list(objects)
    with ThreadPoolExecutor(8) as pool:
        return [title for title in pool.map(change, found) if title]


# a runtime is deleted with its TrainJob
_KINDS = tuple(each for each in DEPENDENT_KINDS if each[1] not in (CLAIM, RUNTIME))
# Running pods do not need these; other objects stay while pods that use them exist.
_NOT_USED_BY_PODS = frozenset({"NetworkPolicy", "PodDisruptionBudget"})


def undo(objects: JobObjects, created: Iterable[ApplyResult], error: KdistError) -> KdistError:
    """Delete the objects that were created before the error, in reverse order; returns the error
    extended by what was deleted.
    """
    deleted: list[str] = []
    left: list[str] = []
    for manifest, applied in reversed(list(created)):
        own = uid(applied.document)
        try:
            if objects.remove(manifest.api_version, manifest.kind, manifest.name, uid=own):
                deleted.append(manifest.title)
        except KdistError:
            left.append(manifest.title)
    lines = [f"deleted again: {', '.join(deleted)}"] if deleted else []
    lines += [f"created, and could not be deleted again: {', '.join(left)}"] if left else []
    text = "\n  ".join([error.message, *lines])
    return KdistError(text, hint=error.hint, next_command=error.next_command, code=error.code)


def find_leftovers(cluster: Cluster, plan: Plan) -> list[Manifest]:
    """Objects of the job that the plan no longer contains, in the order of deletion.

    Objects that the caller may not list are left out, and so are those that existing pods use.
    """
    if not plan.exists:
        return []
    name = plan.job.metadata.name
    planned = {(each.kind, each.name) for each in plan.manifests}
    ours = _list(cluster, name, _KINDS, selector=f"{job_selector(name)},{MANAGED_BY}=kdist")
    left = [
        each
        for each in ours
        if (each.kind, each.name) not in planned and not find_others(each.document, name)
    ]
    if not left:
        return []
    pods = [pod for pod in cluster.list("v1", "Pod", selector=job_selector(name)) if is_active(pod)]
    sent = encode_json([each.document for each in plan.manifests])
    unused = [
        each
        for each in left
        if not (each.kind == "ConfigMap" and f'"{each.name}"' in sent) and not is_used(pods, each)
    ]
    return sort(unused)[::-1]


def prune(cluster: Cluster, plan: Plan, *, dry_run: bool = False) -> Iterator[Manifest]:
    """Delete the leftovers; yields each afterwards. Raises `ApiError` without permission."""
    leftovers = find_leftovers(cluster, plan)
    if leftovers and not dry_run:
        rbac.require(cluster, rbac.to_delete(leftovers))
    objects = objects_of(cluster, plan.job.metadata.name)
    for each in leftovers:
        if objects.remove(each.api_version, each.kind, each.name, dry_run=dry_run):
            yield each


def is_active(pod: dict[str, Any]) -> bool:
    """Whether the pod has not ended."""
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def is_used(pods: Sequence[dict[str, Any]], manifest: Manifest) -> bool:
    """Whether one of the pods uses the object."""
    if manifest.kind in _NOT_USED_BY_PODS:
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
# Names of objects that a job creates in addition to those with its own name.
_DERIVED = (("ConfigMap", RENDEZVOUS_SUFFIX), (CLAIM, "-checkpoints"))


def find_objects(cluster: Cluster, name: str) -> tuple[list[Manifest], list[Manifest]]:
    """Find the job's objects, and foreign ones that have its label or one of its names, both in the
    order of deletion.

    Objects that are garbage-collected with another owner are left out, such as the runtime of a
    TrainJob.
    """
    backend = annotation(cluster.look_up("v1", "ConfigMap", name), BACKEND)
    own = backends.get(backend).kind if backend in backends.NAMES else ""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(
            lambda kind: list(_find_kind(cluster, kind[0], kind[1], name, own)),
            (*DEPENDENT_KINDS, *workload_kinds()),
        )
        seen = [Manifest(each) for listed in found for each in listed]
    ours = [each for each in seen if find_owner(each.document) == name]
    foreign = [
        each
        for each in seen
        if each not in ours and not each.document["metadata"].get("ownerReferences")
    ]

    def is_owned(each: Manifest) -> bool:
        # a runtime has to exist until its TrainJob, which owns it, is gone
        is_runtime = each.kind == RUNTIME
        return bool(_references(each.document) if is_runtime else find_others(each.document, name))

    return sort(each for each in ours if not is_owned(each))[::-1], sort(foreign)[::-1]


def _find_kind(
    cluster: Cluster, api_version: str, kind: str, name: str, own: str
) -> Iterator[dict[str, Any]]:
    """The objects of a kind that have the job's label or one of its names."""
    from kdist.cluster import ApiError

    try:
        listed = cluster.list(api_version, kind, selector=job_selector(name))
    except NotFoundError:
        return  # the cluster has no such kind
    except ApiError as error:
        if error.status == 403 and kind not in ("ConfigMap", own):
            return  # a user who may not list a kind has not created any
        raise
    yield from listed
    names = {each["metadata"]["name"] for each in listed}
    for given in (name, *(f"{name}{suffix}" for of, suffix in _DERIVED if of == kind)):
        found = None if given in names else cluster.find_readable(api_version, kind, given)
        if found is not None:
            yield found


def split(objects: Iterable[Manifest]) -> tuple[list[Manifest], list[Manifest]]:
    """(workloads, all others), each in its order."""
    found = [(each, backends.find(each.api_version, each.kind)) for each in objects]
    return [each for each, kind in found if kind], [each for each, kind in found if not kind]


def remove(
    cluster: Cluster,
    name: str,
    objects: Iterable[Manifest],
    *,
    dry_run: bool = False,
    grace: int | None = None,
    wait: float | None,
) -> Iterator[Manifest]:
    """Delete the objects: the workloads first, the others when the pods have ended. Yields each
    after its deletion. Raises `KdistError` with code TIMEOUT if pods still exist.

    Pods that end save their state, and need the rendezvous for it.

    Args:
        cluster: the cluster to delete from.
        name: of the job.
        objects: its objects, as `find_objects` returns them.
        dry_run: server-side only.
        grace: seconds of grace for the pods; None for their own.
        wait: seconds to wait for the pods; None not to wait.
    """
    workloads, others = split(objects)
    if not dry_run:
        wanted = [
            *rbac.to_delete([*workloads, *others]),
            *rbac.on_pods("delete" if grace is not None else ""),
        ]
        rbac.require(cluster, wanted)
    if workloads and wait is not None and not dry_run:
        # otherwise it would be deleted at once, but pods need the rendezvous to save
        drop_owner(cluster, name, but=RUNTIME)
    own = objects_of(cluster, name)
    makers = find_all_makers(cluster, workloads) if grace is not None else frozenset[str]()
    for each in workloads:
        own.remove(each.api_version, each.kind, each.name, dry_run=dry_run)
        yield each
    # pods deleted by the garbage collector get their own grace period
    if grace is not None and not dry_run:
        end_pods(cluster, name, makers=makers, grace=grace)
    if wait is not None and not dry_run:
        wait_for_pods(cluster, name, timeout=wait)
    for each in others:
        own.remove(each.api_version, each.kind, each.name, dry_run=dry_run)
        yield each


def find_all_makers(cluster: Cluster, workloads: Iterable[Manifest]) -> frozenset[str]:
    """The uids of a job's workloads, and of what these have created to make its pods."""
    from kdist.cluster import find_makers

    return frozenset().union(
        *(
            find_makers(cluster, backend, each.document)
            for each in workloads
            if (backend := backends.find(each.api_version, each.kind)) is not None
        )
    )


def end_pods(cluster: Cluster, name: str, *, makers: frozenset[str], grace: int) -> None:
    """Delete the pods that these makers have made, with this grace period in seconds."""
    own = objects_of(cluster, name, makers=makers)
    for pod in find_pods(cluster, name):
        with suppress(ForeignError):
            own.remove("v1", "Pod", pod["metadata"]["name"], grace=grace)


def find_pods(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """The pods that the job's workload created, not others with the same label."""
    return [
        pod
        for pod in cluster.list("v1", "Pod", selector=job_selector(name))
        if is_made_for(pod, name)
    ]


def wait_for_pods(
    cluster: Cluster,
    name: str,
    *,
    timeout: float,
    active_only: bool = False,
    uids: Collection[str] | None = None,
) -> None:
    """Return when no pod of the job is left, or, with `active_only`, none that has not ended.
    With `uids` those pods are meant. Raises `KdistError` with code TIMEOUT that names the
    remaining pods.
    """

    def find() -> list[dict[str, Any]]:
        if uids is None:
            return find_pods(cluster, name)
        found = cluster.list("v1", "Pod", selector=job_selector(name))
        return [pod for pod in found if uid(pod) in uids]

    end = time.monotonic() + timeout
    while left := [pod for pod in find() if not active_only or is_active(pod)]:
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

"""What a job no longer asks for leaves the cluster: only objects that were made for it, and never a volume claim."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kdist import rights
from kdist.deploy.dependents import BESIDE, CLAIM, RUNTIME, find_others
from kdist.deploy.placing import Plan
from kdist.manifest import Manifest, find_owner, sort

if TYPE_CHECKING:
    from kdist.cluster import Cluster

_KINDS = tuple(each for each in BESIDE if each[1] not in (CLAIM, RUNTIME))  # a runtime goes with its TrainJob
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
        listed = [each for found in pool.map(lambda kind: _list(cluster, kind[0], kind[1], name), _KINDS) for each in found]
    left = [each for each in map(Manifest, listed) if (each.kind, each.name) not in planned and _is_ours(each.document, name)]
    if not left:
        return []
    pods = [pod for pod in cluster.list("v1", "Pod", selector=f"kdist.dev/job={name}") if _lives(pod)]
    sent = json.dumps([each.document for each in plan.manifests])
    gone = [each for each in left if not (each.kind == "ConfigMap" and f'"{each.name}"' in sent) and not _leans(pods, each)]
    return sort(gone)[::-1]


def prune(cluster: Cluster, plan: Plan, *, dry_run: bool = False) -> Iterator[Manifest]:
    """Delete the leftovers, each given back as it goes. Raises `RefusalError` where we may not."""
    leftovers = find_leftovers(cluster, plan)
    if leftovers and not dry_run:
        rights.require(cluster, rights.to_delete(leftovers))
    for each in leftovers:
        if cluster.remove(each.api_version, each.kind, each.name, job=plan.job.metadata.name, dry_run=dry_run):
            yield each


def _list(cluster: Cluster, api_version: str, kind: str, name: str) -> list[dict[str, Any]]:
    from kdist.cluster import RefusalError

    try:
        return cluster.list(api_version, kind, selector=f"kdist.dev/job={name},app.kubernetes.io/managed-by=kdist")
    except RefusalError as error:
        if error.status in (403, 404):
            return []
        raise


def _is_ours(document: dict[str, Any], name: str) -> bool:
    """Whether it was made for the job, which a label alone does not say, and nothing but its workload owns it."""
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

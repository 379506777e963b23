"""The objects that a job's workload owns: the garbage collector deletes them once the workload is
gone, by its TTL or by hand.

Two objects stay. The job's ConfigMap contains the job and its run, so that applying it again
resumes that run; the claim contains the checkpoints and the ledger, which counts generations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kdist import backends
from kdist.backends import CLAIM, DEPENDENT_KINDS
from kdist.errors import NotFoundError
from kdist.manifest import Manifest, find_owner, job_selector

if TYPE_CHECKING:
    from kdist.cluster import Cluster

Reference = dict[str, Any]


def find_others(document: Mapping[str, Any], name: str) -> list[Reference]:
    """The owners of an object other than the job's current or a previous workload."""
    kinds = {kind for _, kind in backends.workload_kinds()}
    references = _references(document)
    return [each for each in references if each.get("kind") not in kinds or each["name"] != name]


def adopt(cluster: Cluster, name: str, workload: Mapping[str, Any]) -> list[str]:
    """Make the workload the owner of the job's dependent objects; returns the titles of those for
    which the permission is missing.
    """
    wanted = {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": name,
        "uid": workload["metadata"]["uid"],
    }
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

    def fetch(kind: tuple[str, str]) -> Iterable[dict[str, Any]]:
        from kdist.cluster import ApiError

        try:
            return cluster.list(*kind, selector=job_selector(name), metadata_only=True)
        except ApiError as error:
            if error.status in (403, 404):
                return []
            raise

    kinds = [each for each in DEPENDENT_KINDS if each[1] != CLAIM]
    with ThreadPoolExecutor(len(kinds)) as pool:
        listed = [Manifest(each) for found in pool.map(fetch, kinds) for each in found]
    ours = [each for each in listed if find_owner(each.document) == name]
    return [each for each in ours if (each.kind, each.name) != ("ConfigMap", name)]


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
        from kdist.cluster import ApiError, JobObjects, JobOwner

        objects = JobObjects(cluster, JobOwner(cluster.namespace, name))
        body = {"metadata": {"ownerReferences": owners(find_others(each.document, name))}}
        try:
            objects.change(each.api_version, each.kind, each.name, body)
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

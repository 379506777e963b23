"""Finds objects that bear the names of a job's objects and belong to somebody else, before a
TrainingJob is sent: the controller would not accept it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from kdist.errors import KdistError
from kdist.manifest import Manifest, find_owner
from kdist.ownership import ForeignError, JobOwner
from kdist.status import find_owning_resource

if TYPE_CHECKING:
    from kdist.cluster import Cluster


_UNBORN = "-"  # stands for the uid of a TrainingJob that is not created yet


def check_names(cluster: Cluster, owner: JobOwner, manifests: Iterable[Manifest]) -> None:
    """Look for each of the objects that the controller will create. Those of an earlier TrainingJob
    of the name are left out: they are garbage-collected.

    Args:
        cluster: the cluster.
        owner: the TrainingJob; without a uid it is a new one.
        manifests: the objects.

    Raises:
        ForeignError: some exist, and are not the job's; it names all of them.
    """
    owner = replace(owner, uid=owner.uid or _UNBORN)

    def find(manifest: Manifest) -> ForeignError | None:
        from kdist.cluster import ApiError

        try:
            found = cluster.get(manifest.api_version, manifest.kind, manifest.name)
        except ApiError as error:
            if error.status not in (403, 404):
                raise
            return None  # the controller looks too
        try:
            owner.check(found, api_version=manifest.api_version, kind=manifest.kind)
        except ForeignError as error:
            earlier = find_owner(found, manifest.kind) == owner.name and find_owning_resource(found)
            return None if earlier else error
        return None

    with ThreadPoolExecutor(8) as pool:
        rivals = [each for each in pool.map(find, list(manifests)) if each is not None]
    if rivals:
        raise join(rivals)


def join(errors: list[ForeignError]) -> KdistError:
    """One error for all objects that belong to others. Its hint is that of the first; with several
    there is one fix for each.
    """
    hints = list(dict.fromkeys(each.hint for each in errors))
    return ForeignError("\n  ".join(str(each) for each in errors), hint="; ".join(hints))

"""The objects that make a job's pods: its workload, and what that creates for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.backends import Backend
from kdist.cluster.client import Objects
from kdist.errors import NotFoundError


def find_makers(cluster: Objects, backend: Backend, workload: Mapping[str, Any]) -> frozenset[str]:
    """The uids of a job's own workload, and of the objects that it has created to make the pods.

    An object of such a name that the workload has not created is none, nor what comes after it.

    Args:
        cluster: the cluster.
        backend: the kind of the workload.
        workload: the workload, which is the job's own.
    """
    metadata = workload["metadata"]
    owner, found = str(metadata["uid"]), {str(metadata["uid"])}
    for api_version, kind, name in backend.pod_owners(str(metadata["name"])):
        try:
            made = cluster.get(api_version, kind, name, metadata.get("namespace"))
        except NotFoundError:
            break
        references = made["metadata"].get("ownerReferences") or []
        if owner not in {each.get("uid") for each in references}:
            break
        owner = str(made["metadata"]["uid"])
        found.add(owner)
    return frozenset(found)

"""TrainingJobs of a cluster that may not serve them, or not show them to the user."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from kdist.cluster.api_errors import ApiError
from kdist.cluster.client import Cluster
from kdist.manifest import TRAINING_JOB

Document = dict[str, Any]
_ABSENT = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


def find_resource(cluster: Cluster, name: str, namespace: str | None = None) -> Document | None:
    """The TrainingJob of this name; None if there is none, if the cluster serves no TrainingJobs,
    or if the user may not read them.
    """
    try:
        return cluster.get(*TRAINING_JOB, name, namespace)
    except ApiError as error:
        if error.status not in _ABSENT:
            raise
        return None


def list_resources(
    cluster: Cluster,
    namespace: str | None = None,
    *,
    all_namespaces: bool = False,
    selector: str = "",
) -> list[Document]:
    """The TrainingJobs with these labels; none if the cluster serves none, or the user may not
    list them.
    """
    try:
        return cluster.list(
            *TRAINING_JOB, namespace=namespace, all_namespaces=all_namespaces, selector=selector
        )
    except ApiError as error:
        if error.status not in _ABSENT:
            raise
        return []

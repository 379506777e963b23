"""The workload of a job whose ConfigMap is gone: what was chosen when the job was first applied
stands in its pods too, so that the run goes on as what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kdist import backends
from kdist.backends import RUNTIME, Backend
from kdist.deploy.approval import is_pod
from kdist.errors import KdistError
from kdist.ownership import JobOwner
from kdist.spec import RUN
from kdist.status import BACKEND, RENDEZVOUS, RUN_ID, documents

if TYPE_CHECKING:
    from kdist.cluster import Cluster

Document = dict[str, Any]
_ABSENT = (403, 404)


class LiveWorkload(NamedTuple):
    """A workload that bears the mark of a job. `decided` is what the annotations of the job's
    ConfigMap said: its backend, rendezvous and run.
    """

    backend: Backend
    document: Document
    decided: dict[str, str]


def find_live_workload(
    cluster: Cluster, name: str, namespace: str | None = None
) -> LiveWorkload | None:
    """The workload of the job `name`, of whichever kind; None if there is none of its own, or none
    that the user may read. Objects of the same name that are not marked as the job's count for
    nothing.
    """
    namespace = namespace or cluster.namespace
    for backend in map(backends.get, backends.NAMES):
        found = _find_own(cluster, JobOwner(namespace, name, backend.name), backend.kind)
        if found is None:
            continue
        made_from = [found]
        if backend.name == "trainjob":
            runtime = _find_own(cluster, JobOwner(namespace, name, backend.name), RUNTIME)
            made_from = [each for each in (runtime, found) if each is not None]
        pods = next((pod for each in made_from for pod in _find_templates(each)), {})
        run = documents.annotation(found, RUN)
        decided = {
            BACKEND: backend.name,
            RUN_ID: documents.annotation(pods, RUN_ID),
            RENDEZVOUS: _read_rendezvous(pods),
            RUN: run,
        }
        return LiveWorkload(backend, found, {key: each for key, each in decided.items() if each})
    return None


def refuse_without(cluster: Cluster, name: str, live: LiveWorkload) -> KdistError:
    """The error of a command that needs what only the ConfigMap of a job holds."""
    return KdistError(
        f"ConfigMap {name} in namespace {cluster.namespace} was deleted: it holds the settings of "
        f"job {name}. Its {live.backend.kind} exists, and its pods go on with what they have read",
        hint="`kdist apply` with the job file creates it again, with the run that the pods have",
        next_command=f"kdist apply JOB.yaml -n {cluster.namespace}",
    )


def _find_own(cluster: Cluster, owner: JobOwner, kind: str) -> Document | None:
    """The object of this kind with the job's name, if it is the job's own."""
    from kdist.cluster import ApiError

    kinds = {known: version for version, known in backends.rendered_kinds(owner.backend)}
    try:
        found = cluster.get(kinds[kind], kind, owner.name, owner.namespace)
    except ApiError as error:
        if error.status in _ABSENT:
            return None
        raise
    return found if owner.owns(found, kind) else None


def _find_templates(value: Any) -> Iterator[Mapping[str, Any]]:
    """The templates of pods in a document."""
    if isinstance(value, Mapping):
        if is_pod(value):
            yield value
            return
        for each in value.values():
            yield from _find_templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from _find_templates(each)


def _read_rendezvous(pod: Mapping[str, Any]) -> str:
    """Where the agents of such a pod meet; empty if it does not say so."""
    for container in documents.items(pod, "spec", "containers"):
        for argument in documents.texts(container, "args"):
            if argument.startswith("--rendezvous="):
                return "c10d" if argument.startswith("--rendezvous=c10d:") else "kubernetes"
    return ""

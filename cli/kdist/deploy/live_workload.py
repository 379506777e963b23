"""Reads back a job whose ConfigMap is gone: what was chosen when it was first applied is recorded
in its pods too, so that its run can continue unchanged.

`record` notes on the workload which objects a user has applied while it kept its old pods, so that
the restart that replaces them need not ask again. Only somebody who may change the workload, and
with it the pods, can write these digests; more people may edit the job's ConfigMap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kdist import backends
from kdist.backends import RUNTIME, Backend
from kdist.errors import KdistError
from kdist.manifest import JobOwner, Manifest
from kdist.render import find_pods
from kdist.spec import RUN
from kdist.status import BACKEND, RENDEZVOUS, RUN_ID, documents
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.cluster import Cluster, JobObjects


_APPLIED: Final = "kdist.dev/applied"
_SIZES: Final = frozenset(size for name in backends.NAMES for size in backends.get(name).sizes)
"""Fields of a workload outside of its pods that commands change, or controllers set."""


def select_workload(manifests: Iterable[Manifest], backend: str) -> list[Manifest]:
    """The objects that say what the pods are: the workload, and the runtime of a TrainJob."""
    kinds = (backends.get(backend).kind, RUNTIME)
    return [each for each in manifests if each.kind in kinds]


def is_new(manifest: Manifest, sent: Iterable[Manifest]) -> bool:
    """Whether none of the objects that are sent has these pods."""
    return _digest(manifest) not in {_digest(each) for each in sent}


def record(
    objects: JobObjects, workload: Mapping[str, Any], backend: str, deferred: Iterable[Manifest]
) -> None:
    """Write on the workload of this backend which objects were applied, in place of those of
    before.
    """
    digests = " ".join(sorted(_digest(each) for each in deferred)) or None
    if (documents.annotation(workload, _APPLIED) or None) == digests:
        return
    kind = backends.get(backend)
    body = {"metadata": {"annotations": {_APPLIED: digests}}}
    objects.change(kind.api_version, kind.kind, documents.name(workload), body)


def is_recorded(workload: Mapping[str, Any] | None, manifest: Manifest) -> bool:
    """Whether `record` has written on the workload that this object was applied."""
    return _digest(manifest) in documents.annotation(workload, _APPLIED).split()


def without_sizes(value: Any) -> Any:
    """A copy without the fields that commands change; pods are whole."""
    if isinstance(value, list):
        return [without_sizes(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if is_pod(value):
        return dict(value)
    return {key: without_sizes(each) for key, each in value.items() if key not in _SIZES}


def is_pod(value: Mapping[str, Any]) -> bool:
    """Whether this is a template of pods, or a pod."""
    spec = value.get("spec")
    return isinstance(spec, Mapping) and isinstance(spec.get("containers"), list)


def _digest(manifest: Manifest) -> str:
    text = encode_json(without_sizes(manifest.document), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


Document = dict[str, Any]


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
        pods = next((pod for each in made_from for pod in find_pods(each)), {})
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
    kinds = {known: version for version, known in backends.rendered_kinds(owner.backend)}
    found = cluster.find_readable(kinds[kind], kind, owner.name, owner.namespace)
    return found if found is not None and owner.owns(found, kind) else None


def _read_rendezvous(pod: Mapping[str, Any]) -> str:
    """Where the agents of such a pod meet; empty if it does not say so."""
    for container in documents.items(pod, "spec", "containers"):
        for argument in documents.texts(container, "args"):
            if argument.startswith("--rendezvous="):
                return "c10d" if argument.startswith("--rendezvous=c10d:") else "kubernetes"
    return ""

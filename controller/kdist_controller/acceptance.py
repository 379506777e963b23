"""Whether a TrainingJob can be made, and where and as which run: whatever it is refused for is said
in its condition Accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kdist import backends
from kdist.backends import Placement
from kdist.errors import KdistError
from kdist.manifest import find_owner
from kdist.ownership import ForeignError, ObjectKey
from kdist.spec import KIND, TrainingJob
from kdist.status import documents
from kdist.status.documents import Document
from kdist_controller.observation import Observed
from kdist_controller.rendering import list_children


def choose_placement(observed: Observed, wanted: TrainingJob) -> Placement:
    """Where and as which run the job runs: as its status says, else as is decided now, by the
    TrainingJob's uid and what the cluster serves.

    Raises:
        KdistError: the job cannot run on this cluster.
    """
    status = observed.resource.status
    backend = observed.backend.name if observed.backend else ""
    if not backend:
        backend = wanted.spec.backend
        if backend == "auto":
            backend = backends.choose(observed.kinds, wanted)
        kind = backends.get(backend)
        if (kind.api_version, kind.kind) not in observed.kinds:
            raise KdistError(
                f"backend {backend}: this cluster has no {kind.kind} ({kind.api_version})",
                hint="install its operator, or let `backend: auto` choose what the cluster has",
            )
    rendezvous = documents.text(status, "rendezvous") or backends.choose_rendezvous(wanted)
    run_id = documents.text(status, "runId")
    if not run_id:
        namespace, uid = observed.resource.key.namespace, observed.resource.uid
        run_id = (
            f"{namespace}/{wanted.run}"
            if wanted.run is not None
            else hashlib.sha256(uid.encode()).hexdigest()[:8]
        )
    return Placement(backend, "c10d" if rendezvous == "c10d" else "kubernetes", run_id)


def check(observed: Observed, wanted: TrainingJob, placement: Placement) -> bool:
    """Raise `KdistError` if the job cannot be made, or not be made like this.

    Returns:
        Whether objects of an earlier TrainingJob of this name have to go first.
    """
    name = observed.resource.key.name
    backend = backends.get(placement.backend)
    if wanted.spec.backend not in ("auto", placement.backend):
        raise KdistError(
            f"{name} runs as backend {placement.backend}, but spec.backend is "
            f"{wanted.spec.backend}: the kind of an existing job cannot be changed",
            hint="delete the TrainingJob, which keeps the checkpoints, and apply it again",
        )
    if wanted.spec.code is not None and wanted.spec.code.path is not None:
        raise KdistError(
            f"spec.code: {wanted.spec.code.path} is a folder, which does not travel with a "
            "TrainingJob",
            hint="put the code into the image, or into a ConfigMap and name it: "
            "code: {configMap: NAME}",
        )
    own = (ObjectKey("v1", "ConfigMap", name), ObjectKey(backend.api_version, backend.kind, name))
    names = {*list_children(wanted, placement, observed.resource.results), *own}
    rivals = [(key, each) for key, each in observed.rivals.items() if key in names]
    waits = [key for key, each in rivals if _is_leftover(observed, each)]
    foreign = [(key, each) for key, each in rivals if key not in waits]
    if foreign:
        raise _refuse(observed, foreign)
    return bool(waits)


def _refuse(observed: Observed, foreign: Sequence[tuple[ObjectKey, Document]]) -> KdistError:
    """The error of objects that have the name of one of the job's, and are not its own."""
    name, namespace = observed.resource.key.name, observed.resource.key.namespace
    marked = [key for key, each in foreign if find_owner(each, key.kind) == name]
    if len(marked) == len(foreign):
        objects = ", ".join(f"{key.kind} {key.name}" for key in marked)
        return KdistError(
            f"a job {name} without a TrainingJob is in namespace {namespace} already: {objects}",
            hint=f"`kdist delete {name} -n {namespace}` deletes it and this TrainingJob, and keeps "
            "the checkpoints: applied again, it continues from them",
        )
    errors = []
    for key, each in foreign:
        try:
            observed.owner.check(each, api_version=key.api_version, kind=key.kind)
        except ForeignError as error:
            errors.append(error)
    return ForeignError("; ".join(each.message for each in errors), hint=errors[0].hint)


def _is_leftover(observed: Observed, document: Document) -> bool:
    """Whether this is an object of an earlier TrainingJob of this name, with which it goes."""
    owners = documents.items(document, "metadata", "ownerReferences")
    key = (KIND, observed.resource.key.name)
    return any((owner.get("kind"), owner.get("name")) == key for owner in owners)

"""What a user has applied of a job while its workload kept its old pods: they are replaced by a
restart, which then need not ask again.

The digests of what was applied stand on the workload itself. Only who may change the workload, and
with it the pods, can write them there; the job's ConfigMap is open to more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kdist import backends
from kdist.backends import RUNTIME
from kdist.manifest import Manifest
from kdist.status import documents
from kdist_trainer.json_text import encode_json

if TYPE_CHECKING:
    from kdist.cluster import JobObjects

_APPLIED: Final = "kdist.dev/applied"
_SIZES: Final = frozenset(
    {
        "completions",
        "maxReplicas",
        "minReplicas",
        "numNodes",
        "parallelism",
        "replicas",
        "selector",
        "successPolicy",
        "suspend",
    }
)
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

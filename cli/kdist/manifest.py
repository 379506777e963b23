"""One Kubernetes object as kdist sends it: its document, who it is, and its place in the order of
sending.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

OWNER: Final = "kdist.dev/owner"
"""Annotation that says which job an object was made for, and as which object: a copy under another
name does not bear it.
"""

# Characters that JSON leaves bare and YAML does not take inside a quoted string, or folds as line
# breaks.
_BARE_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")

# What others lean on goes first: a pod that starts before its ConfigMap or Role exists waits for a
# retry of the kubelet.
_FIRST = (
    "Namespace",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "PersistentVolumeClaim",
    "ConfigMap",
    "Secret",
    "Service",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "TrainingRuntime",
)


def to_json(value: object) -> str:
    """`value` as JSON that is YAML too, which is how an API server reads an apply.

    With ASCII alone 😀 would be two surrogates, which YAML refuses. Raises `ValueError` for NaN and
    infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _BARE_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


@dataclass(frozen=True)
class Manifest:
    """A Kubernetes object. `document` is the whole of it in plain values, as it was parsed back
    from the rendered text.

    `sources` says which field of job.yaml a leaf of the document comes from, by its path: `("spec",
    "replicas")`.
    """

    document: dict[str, Any]
    sources: Mapping[tuple[str | int, ...], str] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raises `ValueError` where the document lacks what makes it an object."""
        metadata = self.document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        for what, value in (
            ("apiVersion", self.document.get("apiVersion")),
            ("kind", self.document.get("kind")),
            ("name", name),
        ):
            if not (isinstance(value, str) and value):
                raise ValueError(f"a manifest needs its {what}")

    @property
    def api_version(self) -> str:
        return str(self.document["apiVersion"])

    @property
    def kind(self) -> str:
        return str(self.document["kind"])

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def namespace(self) -> str | None:
        """Namespace written in the object, or None where the caller's own is meant."""
        namespace = self.document["metadata"].get("namespace")
        return None if namespace is None else str(namespace)

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """(API version, kind, namespace or "", name): equal for two documents that describe the
        same object.
        """
        return self.api_version, self.kind, self.namespace or "", self.name

    @property
    def title(self) -> str:
        """What kubectl calls it: `configmap/digits`, `job.batch/digits`."""
        group = self.api_version.rpartition("/")[0]
        return f"{'.'.join(part for part in (self.kind.lower(), group) if part)}/{self.name}"

    @property
    def order(self) -> int:
        """Place in the order of sending; deletion goes the other way."""
        return _FIRST.index(self.kind) if self.kind in _FIRST else len(_FIRST)


def mark(job: str, kind: str, name: str) -> str:
    """Value of the annotation `OWNER` of an object that a job is made of."""
    return f"{job}/{kind.lower()}/{name}"


def find_owner(document: Mapping[str, Any], kind: str = "") -> str | None:
    """The job whose mark an object bears; None where it bears none, or that of the object it is a
    copy of.
    """
    metadata = document.get("metadata") or {}
    found = str((metadata.get("annotations") or {}).get(OWNER) or "")
    job = found.partition("/")[0]
    kind = kind or str(document.get("kind") or "")
    return job if job and found == mark(job, kind, str(metadata.get("name"))) else None


def sort(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The manifests in the order of sending, ties kept. Raises `ValueError` if one object is
    described twice.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.order)
    identities = [manifest.identity for manifest in ordered]
    for identity in identities:
        if identities.count(identity) > 1:
            raise ValueError(f"{identity[1]}/{identity[3]} is described twice")
    return ordered

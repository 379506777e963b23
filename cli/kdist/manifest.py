"""A Kubernetes object as kdist applies it: its document, its identity, and its position in the
order of the apply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

OWNER: Final = "kdist.dev/owner"
"""Annotation with the job that an object was created for, and the object's kind and name, so that
a copy under another name does not count as the job's.
"""

JOB_LABEL: Final = "kdist.dev/job"
"""Label with the job's name on every object of a job, and on its pods."""

TRAINING_JOB: Final = ("kdist.dev/v1alpha1", "TrainingJob")
"""API version and kind of a job as a resource of the cluster, which the controller acts on."""

CODE_LABEL: Final = "kdist.dev/code-of"
"""Label with the job's name on a ConfigMap with the files of its code, where a TrainingJob names
the ConfigMap. It is none of the objects that the controller creates.
"""

RENDEZVOUS_SUFFIX: Final = "-rendezvous"
"""How the name ends of the ConfigMap that a job's agents meet in, after the job's name."""

RECLAIM_POLICY: Final = "kdist.dev/reclaim-policy"
"""Annotation of a claim that kdist created for checkpoints: `Delete` if it goes with the job."""

# Characters that JSON leaves unescaped and that YAML does not allow in a quoted string, or folds as
# line breaks.
_BARE_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")

# Dependencies come first: a pod that starts before its ConfigMap or Role exists waits for a retry
# of the kubelet.
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
    """Serialize `value` as JSON that is valid YAML too, because an API server reads an apply as
    YAML.

    In ASCII, 😀 would be two surrogates, which YAML rejects. Raises `ValueError` for NaN and
    infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _BARE_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


@dataclass(frozen=True)
class Manifest:
    """A Kubernetes object.

    Attributes:
        document: the whole object as plain values, parsed from the rendered text.
        sources: the field of job.yaml that a leaf of the document comes from, by its path, such as
            `("spec", "replicas")`.
    """

    document: dict[str, Any]
    sources: Mapping[tuple[str | int, ...], str] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raises `ValueError` if apiVersion, kind or name is missing."""
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
        """The object's namespace; None for that of the connection."""
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
        """The name as kubectl prints it: `configmap/digits`, `job.batch/digits`."""
        group = self.api_version.rpartition("/")[0]
        return f"{'.'.join(part for part in (self.kind.lower(), group) if part)}/{self.name}"

    @property
    def order(self) -> int:
        """Position in the order of the apply; deletion uses the reverse order."""
        return _FIRST.index(self.kind) if self.kind in _FIRST else len(_FIRST)


def name_rendezvous(job: str) -> str:
    """The name of the ConfigMap that the agents of a job meet in."""
    return f"{job}{RENDEZVOUS_SUFFIX}"


def job_selector(name: str) -> str:
    """Label selector for the objects of the job `name`."""
    return f"{JOB_LABEL}={name}"


def mark(job: str, kind: str, name: str) -> str:
    """Value of the annotation `OWNER` for an object of a job."""
    return f"{job}/{kind.lower()}/{name}"


def find_owner(document: Mapping[str, Any], kind: str = "") -> str | None:
    """The job that an object is marked for; None if it has no mark, or that of another object of
    which it is a copy.
    """
    metadata = document.get("metadata") or {}
    found = str((metadata.get("annotations") or {}).get(OWNER) or "")
    job = found.partition("/")[0]
    kind = kind or str(document.get("kind") or "")
    return job if job and found == mark(job, kind, str(metadata.get("name"))) else None


def sort(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The manifests in the order of the apply; the sort is stable. Raises `ValueError` if an object
    is described twice.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.order)
    identities = [manifest.identity for manifest in ordered]
    for identity in identities:
        if identities.count(identity) > 1:
            raise ValueError(f"{identity[1]}/{identity[3]} is described twice")
    return ordered

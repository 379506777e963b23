"""A Kubernetes object as kdist applies it: its document, its identity, and its position in the
order of the apply.

Also here: the kinds of objects that a job consists of (kdist creates, changes and deletes no others
for it), and their ownership: kdist changes and deletes only objects that are marked as the job's
own. The mark is the annotation `OWNER`, set when an object is created. Labels, names and field
managers prove nothing: anybody may write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kdist.errors import KdistError
from kdist_trainer.formats import JOB_API_VERSION

OWNER: Final = "kdist.dev/owner"
"""Annotation with the job that an object was created for, and the object's kind and name, so that
a copy under another name does not count as the job's.
"""

JOB_LABEL: Final = "kdist.dev/job"
"""Label with the job's name on every object of a job, and on its pods."""

TRAINING_JOB: Final = (JOB_API_VERSION, "TrainingJob")
"""API version and kind of a job as a resource of the cluster, which the controller acts on."""

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""Label with the tool that created an object: `kdist` on those of jobs."""

QUEUE_GROUP: Final = "kueue.x-k8s.io"
"""API group of Kueue."""
QUEUE_PREFIX: Final = f"{QUEUE_GROUP}/"
"""How the API versions of Kueue's Workloads begin."""
QUEUE_LABEL: Final = f"{QUEUE_PREFIX}queue-name"
"""Label of a workload with the LocalQueue of Kueue that it waits in."""

AVOID_LABEL: Final = "kdist.dev/avoid"
"""Label with a job's name on the pod that keeps the job's pods from its node, and on the Job that
makes that pod.
"""

NODES_ANNOTATION: Final = "kdist.dev/nodes"
"""Annotation of a pod with the limits on the number of nodes, as MIN:MAX: a change lets its kubelet
update what it mounts, so that its agent soon reads them.
"""

COMMIT: Final = "kdist.dev/commit"
"""Annotation of a job's ConfigMap or TrainingJob with the git commit of its file's folder at the
last apply that changed anything; no other object has it.
"""

CODE_SENT: Final = "kdist.dev/code-sent"
"""Annotation of the same objects with the claim, by its uid, and the folder on it that have the
files of the job's code since the last apply.
"""

CODE_LABEL: Final = "kdist.dev/code-of"
"""Label with the job's name on a ConfigMap with the files of its code, where a TrainingJob names
the ConfigMap. It is none of the objects that the controller creates.
"""

RENDEZVOUS_SUFFIX: Final = "-rendezvous"
"""How the name ends of the ConfigMap that a job's agents meet in, after the job's name."""

CONFIG_MAP_BYTES: Final = 1 << 20
"""What a ConfigMap holds at most."""
CODE_BYTES: Final = 1 << 30
"""What a code folder has at most: more is data, which each node would fetch before its agent."""

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


def own_labels(job: Any) -> dict[str, Any]:
    """The labels of every object of the job with this name."""
    return {
        "app.kubernetes.io/name": "kdist",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": "training",
        MANAGED_BY: "kdist",
        JOB_LABEL: job,
    }


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
        for part, value in (
            ("apiVersion", self.document.get("apiVersion")),
            ("kind", self.document.get("kind")),
            ("name", name),
        ):
            if not (isinstance(value, str) and value):
                raise ValueError(f"a manifest needs its {part}")

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
    def stays(self) -> bool:
        """Whether it outlives its job: a claim with checkpoints that need not go with it."""
        annotations = self.document["metadata"].get("annotations") or {}
        return self.kind == CLAIM and annotations.get(RECLAIM_POLICY) != "Delete"

    @property
    def namespace(self) -> str | None:
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


def group_kind(api_version: object, kind: object) -> tuple[str, str]:
    """(API group, kind): the same word may be a kind of two groups, such as the Job of `batch` and
    that of Volcano.
    """
    return str(api_version or "").rpartition("/")[0], str(kind or "")


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
    """The job that an object is marked for; None without a mark, or if the object is a copy."""
    metadata = document.get("metadata") or {}
    found = str((metadata.get("annotations") or {}).get(OWNER) or "")
    job = found.partition("/")[0]
    kind = kind or str(document.get("kind") or "")
    return job if job and found == mark(job, kind, str(metadata.get("name"))) else None


def refer_to(owner: Mapping[str, Any]) -> dict[str, Any]:
    """The owner reference by which an object is deleted with this one."""
    metadata = owner["metadata"]
    kept = {"name": metadata["name"], "uid": metadata["uid"]}
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **kept}


def sort(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The manifests in the order of the apply. Raises `ValueError` if an object appears twice."""
    ordered = sorted(manifests, key=lambda manifest: manifest.order)
    identities = [manifest.identity for manifest in ordered]
    for identity in identities:
        if identities.count(identity) > 1:
            raise ValueError(f"{identity[1]}/{identity[3]} is described twice")
    return ordered


CLAIM: Final[str] = "PersistentVolumeClaim"
RUNTIME: Final[str] = "TrainingRuntime"
KEY_KIND: Final[tuple[str, str]] = ("v1", "Secret")
"""(API version, kind) of the key of a job's exchange, which is created and nothing else: nobody who
runs kdist needs to read or change Secrets.
"""
_RBAC = "rbac.authorization.k8s.io/v1"

DEPENDENT_KINDS: Final[tuple[tuple[str, str], ...]] = (
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("v1", CLAIM),
    (_RBAC, "Role"),
    (_RBAC, "RoleBinding"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    ("trainer.kubeflow.org/v1alpha1", RUNTIME),
)
"""(API version, kind) of a job's objects besides its workload, which owns pods and what controllers
create.
"""


class ObjectKey(NamedTuple):
    """API version, kind and name of an object in the job's namespace."""

    api_version: str
    kind: str
    name: str


class ForeignError(KdistError):
    """An object with the name of a job's object belongs to somebody else: `found`, or None if it is
    no object of the cluster.
    """

    def __init__(self, message: str, *, hint: str = "", found: ObjectKey | None = None) -> None:
        super().__init__(message, hint=hint)
        self.found = found


@dataclass(frozen=True)
class JobOwner:
    """A job, as the owner of objects. Its namespace and name are those of the TrainingJob or of the
    ConfigMap that was read, never of a document inside one.

    Attributes:
        namespace: the only one in which its objects are.
        name: of the job.
        backend: name of its workload kind; empty if that is not known.
        uid: of its TrainingJob; empty for a job that was applied without one.
        makers: uids of the objects that make its pods: its workload, and what that has created for
            it. `find_makers` finds them.
    """

    namespace: str
    name: str
    backend: str = ""
    uid: str = ""
    makers: frozenset[str] = frozenset()

    def owns(self, document: Mapping[str, Any], kind: str = "") -> bool:
        """Whether an object is the job's, of `kind` if the document does not say it: what was
        created for it bears its mark and, with a TrainingJob, its uid as an owner. Claims outlive
        the TrainingJob, and pods of ours that only read have none, so their mark is enough. Other
        pods are controlled by a maker.
        """
        kind = kind or str(document.get("kind") or "")
        metadata = document.get("metadata") or {}
        if str(metadata.get("namespace") or self.namespace) != self.namespace:
            return False
        if kind == TRAINING_JOB[1]:
            same = self.uid in ("", metadata.get("uid"))
            return same and metadata.get("name") == self.name
        references = metadata.get("ownerReferences") or []
        if any(each.get("controller") and each.get("uid") in self.makers for each in references):
            return True
        if find_owner(document, kind) != self.name:
            return False
        needs_uid = bool(self.uid) and kind not in (CLAIM, "Pod")
        return not needs_uid or any(each.get("uid") == self.uid for each in references)

    def check(self, document: Mapping[str, Any], *, api_version: str, kind: str) -> None:
        """Raise `ForeignError` for an object that is not the job's."""
        if self.owns(document, kind):
            return
        metadata = document.get("metadata") or {}
        name, namespace = str(metadata.get("name")), metadata.get("namespace")
        group = api_version.rpartition("/")[0]
        title = f"{'.'.join(part for part in (kind.lower(), group) if part)}/{name}"
        where = f" in namespace {namespace}" if namespace else ""
        owner = find_owner(document, kind)
        whose = describe_owner(document, kind)
        if owner == self.name:
            whose = f"it was made for a job {owner}, but not for this TrainingJob"
        raise ForeignError(
            f"{title}{where} does not belong to job {self.name}: {whose}; kdist does not change it",
            hint=self._suggest_fix(title, owner),
            found=ObjectKey(api_version, kind, name),
        )

    def _suggest_fix(self, title: str, owner: str | None) -> str:
        resource, _, name = title.partition("/")
        kind, place = resource.partition(".")[0], f"-n {self.namespace}"
        if owner not in (None, self.name):
            return "give this job another name"
        if kind == CLAIM.lower():
            return (
                f"`checkpoints: {{claim: {name}}}` keeps the checkpoints on it as it is; or give "
                "the job another name"
            )
        if self.uid or owner is not None:
            return (
                "give the job another name; if nobody needs the object, "
                f"`kubectl delete {resource} {name} {place}` makes room"
            )
        own = f"{OWNER}={mark(self.name, kind, name)}"
        command = f"kubectl annotate {resource} {name} {own} --overwrite {place}"
        return (
            f"give the job another name; if the object is this job's after all, `{command}` says so"
        )


def describe_owner(document: Mapping[str, Any], kind: str = "") -> str:
    """Who created an object: a job of kdist, an owner, a tool, or the first field manager."""
    owner = find_owner(document, kind)
    if owner is not None:
        return f"it belongs to job {owner}"
    metadata = document.get("metadata") or {}
    for reference in metadata.get("ownerReferences") or []:
        return f"it belongs to {reference.get('kind')}/{reference.get('name')}"
    tool = (metadata.get("labels") or {}).get(MANAGED_BY)
    if tool and tool != "kdist":
        return f"it is managed by {tool}"
    managers = (each.get("manager") for each in metadata.get("managedFields") or [])
    if manager := next(filter(None, managers), None):
        return f"it was created by {manager} and is not marked as kdist's"
    return "it is not marked as kdist's"

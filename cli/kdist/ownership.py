"""Ownership of objects: kdist changes and deletes only objects that are marked as the job's own.

The mark is the annotation `kdist.manifest.OWNER`, which an object is created with. Labels, names
and field managers are no proof: anybody may write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kdist.backends import CLAIM
from kdist.errors import KdistError
from kdist.manifest import OWNER, TRAINING_JOB, find_owner, mark


class ObjectKey(NamedTuple):
    """API version, kind and name of an object in the job's namespace."""

    api_version: str
    kind: str
    name: str


class ForeignError(KdistError):
    """An object with the name of a job's object belongs to somebody else.

    Attributes:
        found: that object; None if it is no object of the cluster.
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
        """Whether an object is the job's: what was created for it bears its mark and, with a
        TrainingJob, its uid as an owner. Claims outlive the TrainingJob, and pods of ours
        that only read have none, so their mark is enough. Other pods are controlled by a maker.

        Args:
            document: the object.
            kind: of the object, if the document does not say it.
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
        """A way out, with commands that can be typed as they are."""
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
    """Describe who created an object, if it is known: a job of kdist, an owner, a tool, or the
    first field manager.
    """
    owner = find_owner(document, kind)
    if owner is not None:
        return f"it belongs to job {owner}"
    metadata = document.get("metadata") or {}
    for reference in metadata.get("ownerReferences") or []:
        return f"it belongs to {reference.get('kind')}/{reference.get('name')}"
    tool = (metadata.get("labels") or {}).get("app.kubernetes.io/managed-by")
    if tool and tool != "kdist":
        return f"it is managed by {tool}"
    managers = [
        str(each.get("manager"))
        for each in metadata.get("managedFields") or []
        if each.get("manager")
    ]
    return (
        f"it was created by {managers[0]} and is not marked as kdist's"
        if managers
        else "it is not marked as kdist's"
    )

"""Ownership of objects: kdist changes and deletes only objects that are marked as the job's own.

The mark is the annotation `kdist.manifest.OWNER`, which an object is created with. Labels, names
and field managers are no proof: anybody may write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.cluster import resources
from kdist.errors import KdistError
from kdist.manifest import OWNER, find_owner, mark


class ForeignError(KdistError):
    """An object with the name of a job's object belongs to somebody else."""


def check_owner(document: Mapping[str, Any], job: str, *, api_version: str, kind: str) -> None:
    """Check that an object belongs to a job.

    Args:
        document: the object.
        job: name of the job.
        api_version: of the object.
        kind: of the object.

    Raises:
        ForeignError: the object belongs to somebody else.
    """
    owner = find_owner(document, kind)
    if owner == job:
        return
    metadata = document.get("metadata") or {}
    name, namespace = str(metadata.get("name")), metadata.get("namespace")
    group = resources.group(api_version)
    title = f"{'.'.join(part for part in (kind.lower(), group) if part)}/{name}"
    where = f" in namespace {namespace}" if namespace else ""
    raise ForeignError(
        (
            f"{title}{where} does not belong to job {job}: "
            f"{describe_owner(document, kind)}; kdist does not change it"
        ),
        hint=_suggest_fix(job, kind, name, owner),
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


def _suggest_fix(job: str, kind: str, name: str, owner: str | None) -> str:
    if owner is not None:
        return "give this job another name"
    if kind == "PersistentVolumeClaim":
        return (
            f"`checkpoints: {{claim: {name}}}` keeps the checkpoints on it as it is; or give "
            "the job another name"
        )
    command = f"kubectl annotate {kind.lower()} {name} {OWNER}={mark(job, kind, name)}"
    return f"give the job another name; if the object is this job's after all, `{command}` says so"

"""The one way in which a job's objects are created, changed and deleted: `JobObjects` checks each
of them just before it is sent. `tests/house/test_doors.py` finds whoever goes past it.

    owner = JobOwner(namespace, name, backend="job", uid=…, makers=…)
    objects = JobObjects(cluster, owner)
    objects.apply(manifest)  # server-side apply of a rendered object
    objects.change("v1", "ConfigMap", name, {"metadata": {"annotations": {…}}})
    objects.remove("v1", "Pod", name, grace=0)

Checked before anything is sent: it is in the job's own namespace; it is one of the kinds that the
job's backend renders, a pod of the job, its Workload of Kueue, or its TrainingJob; what is created
bears the creation mark, and with a TrainingJob its uid as owner. Checked of what exists: it is the
job's own, by `JobOwner.owns`. A change or deletion then names the uid and resourceVersion of the
object that was checked, so it reaches this very object or none. `ForeignError` says whose it is.

`find_makers` finds the objects that make a job's pods: its workload, and what that creates for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from http import HTTPStatus
from typing import Any, Final, TypeVar

from kdist import backends
from kdist.backends import Backend
from kdist.cluster.api_errors import ApiError, ApiNotFoundError
from kdist.cluster.client import (
    ABSENT,
    Applied,
    Objects,
    Verb,
    guard,
    normalize,
    retry_on_conflict,
)
from kdist.cluster.transport import ApiResponse
from kdist.errors import KdistError
from kdist.manifest import (
    JOB_LABEL,
    QUEUE_PREFIX,
    TRAINING_JOB,
    ForeignError,
    JobOwner,
    Manifest,
    find_owner,
)
from kdist.status import documents

Document = dict[str, Any]
T = TypeVar("T")
_POD: Final = ("v1", "Pod")


class _Unread(Enum):
    """Nobody has read the object yet."""

    UNREAD = "unread"


class JobObjects:
    """Creates, changes and deletes the objects of one job, and nothing else.

    All methods raise `ForeignError` for an object that is somebody else's, and `KdistError` for one
    that no job of this owner may have; nothing is sent then. `ApiError` is the server's refusal.
    """

    def __init__(self, cluster: Objects, owner: JobOwner) -> None:
        self._cluster = cluster
        self.owner = owner

    def apply(
        self,
        manifest: Manifest,
        *,
        known: Mapping[str, Any] | _Unread | None = _Unread.UNREAD,
        dry_run: bool = False,
        force: bool = False,
    ) -> Applied:
        """Send an object by server-side apply as the connection's field manager.

        Args:
            manifest: the object.
            known: a copy of the object, of which the metadata is enough, or None if there is said
                to be none: saves a request where that is right.
            dry_run: the server returns the result, including admission and defaults, and stores
                nothing.
            force: take over fields of other field managers.
        """
        self._check_new(manifest.document, manifest.api_version, manifest.kind)
        if not isinstance(known, _Unread) and not dry_run:
            try:
                answer = self._send(manifest, known, dry_run=False, force=force)
            except ApiError as error:
                if error.status != HTTPStatus.CONFLICT:
                    raise
            else:
                verb: Verb = "configured" if known else "created"
                before = None if known is None else dict(known)
                return Applied(answer.document(), verb, before, answer.warnings)
        return retry_on_conflict(lambda: self._apply(manifest, dry_run=dry_run, force=force))

    def _apply(self, manifest: Manifest, *, dry_run: bool, force: bool) -> Applied:
        before = self._cluster.find(manifest)
        try:
            answer = self._send(manifest, before, dry_run=dry_run, force=force)
        except ApiError as error:
            if set(error.owners) != {self._cluster.field_manager}:
                raise
            # our own patches (scale, suspend) own the fields they set; the file is newer
            answer = self._send(manifest, before, dry_run=dry_run, force=True)
        after = answer.document()
        verb: Verb = "configured"
        if before is None:
            verb = "created"
        elif normalize(before) == normalize(after):
            verb = "unchanged"
        return Applied(after, verb, before, answer.warnings)

    def _send(
        self, manifest: Manifest, before: Mapping[str, Any] | None, *, dry_run: bool, force: bool
    ) -> ApiResponse:
        if before is not None:
            self.owner.check(before, api_version=manifest.api_version, kind=manifest.kind)
        guarded = replace(manifest, document=guard(manifest.document, before or ABSENT))
        return self._cluster.send_apply(guarded, dry_run=dry_run, force=force)

    def create(self, document: Mapping[str, Any], *, dry_run: bool = False) -> Document:
        """Create an object that bears the creation mark; the server answers 409 if one exists."""
        kind = str(document["apiVersion"]), str(document["kind"])
        self._check_new(document, *kind, creates_key=kind == backends.KEY_KIND)
        return self._cluster.send_create(document, namespace=self.owner.namespace, dry_run=dry_run)

    def change(
        self,
        api_version: str,
        kind: str,
        name: str,
        body: Mapping[str, Any],
        *,
        known: Mapping[str, Any] | None = None,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Document:
        """Change some fields of an object; returns the changed object.

        Args:
            api_version: of the object.
            kind: of the object.
            name: of the object.
            body: a merge patch: null removes a field, a list replaces the whole list.
            known: the object as it was read: if it has changed since, the server answers 409.
                Without it the object is read now, and again after a conflict.
            subresource: the part of the object that is changed, such as `status`.
            dry_run: let the server check it, and change nothing.
        """
        self._check_kind(api_version, kind)

        def send(before: Mapping[str, Any]) -> Document:
            self.owner.check(before, api_version=api_version, kind=kind)
            return self._cluster.send_patch(
                api_version,
                kind,
                name,
                guard(body, before),
                namespace=self.owner.namespace,
                subresource=subresource,
                dry_run=dry_run,
            )

        return self._with_current(api_version, kind, name, known, send)

    def remove(
        self,
        api_version: str,
        kind: str,
        name: str,
        *,
        known: Mapping[str, Any] | None = None,
        uid: str = "",
        propagation: str = "Background",
        grace: int | None = None,
        dry_run: bool = False,
    ) -> bool:
        """Delete an object; False if it does not exist, or no longer as the one with this uid.

        Args:
            api_version: of the object.
            kind: of the object.
            name: of the object.
            known: as for `change`.
            uid: of the object that is meant; empty for whichever has the name.
            propagation: `Background`, `Foreground` or `Orphan`.
            grace: grace period of a pod in seconds, instead of that in its spec.
            dry_run: let the server check it, and delete nothing.
        """
        self._check_kind(api_version, kind)

        def send(before: Mapping[str, Any]) -> bool:
            if uid and documents.uid(before) != uid:
                return False
            self.owner.check(before, api_version=api_version, kind=kind)
            return self._cluster.send_delete(
                api_version,
                kind,
                name,
                namespace=self.owner.namespace,
                propagation=propagation,
                grace=grace,
                dry_run=dry_run,
                only=before,
            )

        try:
            return self._with_current(api_version, kind, name, known, send)
        except ApiNotFoundError:
            return False

    def remove_ownerless(
        self, name: str, *, uid: str, grace: int | None = None, dry_run: bool = False
    ) -> bool:
        """Delete a pod that bears the job's label and that nothing owns, which a user has said to
        be the job's; False if it does not exist any more. Others are refused.

        Args:
            name: of the pod.
            uid: of the pod that was shown to the user.
            grace: grace period in seconds, instead of that in its spec.
            dry_run: let the server check it, and delete nothing.
        """

        def send(before: Mapping[str, Any]) -> bool:
            metadata = before["metadata"]
            if documents.uid(before) != uid:
                return False
            labels = metadata.get("labels") or {}
            if metadata.get("ownerReferences") or labels.get(JOB_LABEL) != self.owner.name:
                raise self._refuse("Pod", f"{name}, which has an owner or another label,")
            place = self.owner.namespace
            return self._cluster.send_delete(
                *_POD, name, namespace=place, grace=grace, dry_run=dry_run, only=before
            )

        try:
            return self._with_current(*_POD, name, None, send)
        except ApiNotFoundError:
            return False

    def _with_current(
        self,
        api_version: str,
        kind: str,
        name: str,
        known: Mapping[str, Any] | None,
        send: Callable[[Mapping[str, Any]], T],
    ) -> T:
        """Call `send` with the object as it is known, or as it is read now."""
        if known is not None:
            return send(known)
        namespace = self.owner.namespace
        return retry_on_conflict(
            lambda: send(self._cluster.get(api_version, kind, name, namespace))
        )

    def _check_new(
        self,
        document: Mapping[str, Any],
        api_version: str,
        kind: str,
        *,
        creates_key: bool = False,
    ) -> None:
        """Check an object that is about to be created or applied."""
        if not creates_key:
            self._check_kind(api_version, kind)
        metadata = document.get("metadata") or {}
        namespace = metadata.get("namespace") or self._cluster.namespace
        if namespace != self.owner.namespace:
            raise self._refuse(kind, f"{metadata.get('name')} in namespace {namespace}")
        if (api_version, kind) == TRAINING_JOB:
            if metadata.get("name") != self.owner.name:
                raise self._refuse(kind, str(metadata.get("name")))
            return
        if find_owner(document, kind) != self.owner.name:
            raise self._refuse(kind, f"{metadata.get('name')} without its mark")
        owned = {each.get("uid") for each in metadata.get("ownerReferences") or []}
        free = (backends.CLAIM, _POD[1])
        if self.owner.uid and kind not in free and self.owner.uid not in owned:
            raise self._refuse(kind, f"{metadata.get('name')} without its owner")

    def _check_kind(self, api_version: str, kind: str) -> None:
        rendered = backends.rendered_kinds(self.owner.backend)
        queued = kind == "Workload" and api_version.startswith(QUEUE_PREFIX)
        if not queued and (api_version, kind) not in (TRAINING_JOB, _POD, *rendered):
            raise self._refuse(kind, f"({api_version})")

    def _refuse(self, kind: str, description: str) -> KdistError:
        owner = self.owner
        return ForeignError(
            f"{kind.lower()} {description} is not an object of job {owner.name} in namespace "
            f"{owner.namespace}; it is not sent"
        )


def find_makers(cluster: Objects, backend: Backend, workload: Mapping[str, Any]) -> frozenset[str]:
    """The uids of a job's own workload, and of the objects that it has created to make the pods.

    An object of such a name that the workload has not created is none, nor what comes after it.
    """
    metadata, owner = workload["metadata"], documents.uid(workload)
    found = {owner}
    for api_version, kind, name in backend.pod_owners(str(metadata["name"])):
        made = cluster.look_up(api_version, kind, name, metadata.get("namespace")) or {}
        references = (made.get("metadata") or {}).get("ownerReferences") or []
        if owner not in {each.get("uid") for each in references}:
            break
        owner = documents.uid(made)
        found.add(owner)
    return frozenset(found)

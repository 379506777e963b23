"""The verbs on Kubernetes objects: get, list, apply, create, patch, delete, watch."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Literal

from kdist.cluster import resources, watch
from kdist.cluster.api_errors import ApiError, ApiNotFoundError
from kdist.cluster.applied import Applied, essence
from kdist.cluster.concurrency import ABSENT, guard, identify, retry_on_conflict
from kdist.cluster.ownership import check_owner
from kdist.cluster.transport import ApiRequest, ApiResponse, Transport
from kdist.manifest import Manifest, find_owner

FIELD_MANAGER = "kdist"
PAGE = "500"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Document = dict[str, Any]


class Objects:
    """The objects of one cluster; where `namespace` is left out, it is the connection's own."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self.namespace = namespace

    def get(
        self,
        api_version: str,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Document:
        """The object as the server has it."""
        return self._ask(
            "GET", "get", api_version, kind, name=name, namespace=namespace, subresource=subresource
        )

    def list(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
        selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
    ) -> builtins.list[Document]:
        """All objects of the kind that the selectors pick, in the server's order; with
        `metadata_only` nothing else of them.
        """
        place = None if all_namespaces else namespace or self.namespace
        return self.list_with_version(
            api_version,
            kind,
            namespace=place,
            selector=selector,
            field_selector=field_selector,
            metadata_only=metadata_only,
        )[0]

    def list_with_version(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None,
        selector: str = "",
        field_selector: str = "",
        metadata_only: bool = False,
    ) -> tuple[builtins.list[Document], str]:
        """The objects, and the version of the whole from which a watch goes on. Namespace None is
        all of them.
        """
        chosen = [("labelSelector", selector), ("fieldSelector", field_selector)]
        query = [(key, value) for key, value in chosen if value]
        request = ApiRequest(
            "GET",
            resources.path(api_version, kind, namespace=namespace),
            f"list {resources.named(api_version, kind)}",
            [("limit", PAGE), *query],
            accept=_METADATA_ONLY if metadata_only else "application/json",
        )
        found: list[Document] = []
        while True:
            try:
                page = self._transport.send(request).document()
            except ApiError as error:
                if error.status != HTTPStatus.GONE or request.query == query:
                    raise
                # The server has forgotten the list that the pages are of. As Kubernetes' own
                # clients: all of it, at once.
                found, request = [], replace(request, query=query)
                continue
            # Items of a list come without their kind, which everybody who handles one needs.
            found += [
                {**item, "apiVersion": api_version, "kind": kind}
                for item in page.get("items") or []
            ]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion") or "")
            request = replace(
                request, query=[("limit", PAGE), *query, ("continue", metadata["continue"])]
            )

    def apply(self, manifest: Manifest, *, dry_run: bool = False, force: bool = False) -> Applied:
        """Send an object by server-side apply as field manager `kdist`; `force` takes over fields
        that another manager set.

        With `dry_run` the server says what would come of it, admission and defaults included, and
        keeps nothing. An object that is marked as a job's changes only one with the same mark.
        Raises `ForeignError` where another one stands.
        """

        def send() -> tuple[Document | None, ApiResponse]:
            before = self._find(manifest)
            job = find_owner(manifest.document)
            if before is not None and job is not None:
                check_owner(before, job, api_version=manifest.api_version, kind=manifest.kind)
            guarded = replace(manifest, document=guard(manifest.document, before or ABSENT))
            try:
                return before, self._send_apply(guarded, dry_run=dry_run, force=force)
            except ApiError as error:
                if set(error.owners) != {FIELD_MANAGER}:
                    raise
                # Our own patches (scale, suspend) own what they set, and the file is the newer
                # word.
                return before, self._send_apply(guarded, dry_run=dry_run, force=True)

        before, answer = retry_on_conflict(send)
        after = answer.document()
        verb: Literal["created", "configured", "unchanged"] = "configured"
        if before is None:
            verb = "created"
        elif essence(before) == essence(after):
            verb = "unchanged"
        return Applied(after, verb, before, answer.warnings)

    def _find(self, manifest: Manifest) -> Document | None:
        """The object as the server has it, None if it is not there. Raises `ApiNotFoundError` where
        its kind is not known.
        """
        try:
            return self.get(manifest.api_version, manifest.kind, manifest.name, manifest.namespace)
        except ApiNotFoundError as error:
            if not error.details.get("name"):
                raise  # the kind is missing, not the object
            return None

    def _send_apply(self, manifest: Manifest, *, dry_run: bool, force: bool) -> ApiResponse:
        query = [
            ("fieldManager", FIELD_MANAGER),
            ("force", "true" if force else "false"),
            *_dry(dry_run),
        ]
        where: dict[str, Any] = {"name": manifest.name, "namespace": manifest.namespace}
        request = self._request(
            "PATCH", "apply", manifest.api_version, manifest.kind, query=query, **where
        )
        return self._transport.send(
            _carry(request, manifest.document, "application/apply-patch+yaml")
        )

    def create(
        self,
        document: Mapping[str, Any],
        *,
        namespace: str | None = None,
        name: str = "",
        subresource: str = "",
        dry_run: bool = False,
        again: bool = True,
    ) -> Document:
        """Send a new object; with `name` and `subresource`, to that of an object (an eviction).
        `again` as in `ApiRequest`.
        """
        api_version, kind = document["apiVersion"], document["kind"]
        if subresource:  # POST …/pods/NAME/eviction: the path is the parent's
            api_version, kind = "v1", "Pod"
        metadata = document.get("metadata") or {}
        place = namespace or metadata.get("namespace")
        request = self._request(
            "POST",
            "create",
            api_version,
            kind,
            name=name,
            namespace=place,
            subresource=subresource,
            query=_dry(dry_run),
        )
        return self._transport.send(
            _carry(replace(request, again=again), document, "application/json")
        ).document()

    def patch(
        self,
        api_version: str,
        kind: str,
        name: str,
        body: Mapping[str, Any],
        *,
        namespace: str | None = None,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Document:
        """Change some fields of an object: a merge patch, in which null removes a field and a list
        replaces the whole list.
        """
        request = self._request(
            "PATCH",
            "patch",
            api_version,
            kind,
            name=name,
            namespace=namespace,
            subresource=subresource,
            query=[("fieldManager", FIELD_MANAGER), *_dry(dry_run)],
        )
        return self._transport.send(
            _carry(request, body, "application/merge-patch+json")
        ).document()

    def change(
        self,
        api_version: str,
        kind: str,
        name: str,
        body: Mapping[str, Any],
        *,
        job: str,
        namespace: str | None = None,
        dry_run: bool = False,
    ) -> Document:
        """`patch` of an object of the job. Raises `ForeignError` where it is somebody else's, and
        what `patch` raises.
        """

        def send() -> Document:
            before = self.get(api_version, kind, name, namespace)
            check_owner(before, job, api_version=api_version, kind=kind)
            return self.patch(
                api_version, kind, name, guard(body, before), namespace=namespace, dry_run=dry_run
            )

        return retry_on_conflict(send)

    def remove(
        self,
        api_version: str,
        kind: str,
        name: str,
        *,
        job: str,
        propagation: str = "Background",
        dry_run: bool = False,
    ) -> bool:
        """`delete` of an object of the job; False if there was none. Raises `ForeignError` where it
        is somebody else's.
        """

        def send() -> bool:
            try:
                before = self.get(api_version, kind, name)
            except ApiNotFoundError:
                return False
            check_owner(before, job, api_version=api_version, kind=kind)
            return self.delete(
                api_version, kind, name, propagation=propagation, dry_run=dry_run, only=before
            )

        return retry_on_conflict(send)

    def delete(
        self,
        api_version: str,
        kind: str,
        name: str,
        *,
        namespace: str | None = None,
        propagation: str = "Background",
        grace: int | None = None,
        dry_run: bool = False,
        only: Mapping[str, Any] | None = None,
    ) -> bool:
        """Delete an object; False if there was none. `grace`: seconds that its pod gets, instead of
        those in its spec.

        `only` is the object as it was seen: one that has changed since, or another in its place, is
        refused with 409.
        """
        options: Document = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if only is not None:
            options["preconditions"] = identify(only)
        if dry_run:
            options["dryRun"] = ["All"]
        request = self._request(
            "DELETE", "delete", api_version, kind, name=name, namespace=namespace
        )
        try:
            self._transport.send(_carry(request, options, "application/json"))
        except ApiNotFoundError:
            return False
        return True

    def watch(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
        selector: str = "",
        field_selector: str = "",
        timeout: float | None = None,
        since: str = "",
    ) -> Iterator[tuple[str, Document]]:
        """(ADDED | MODIFIED | DELETED, object) for what is there and then for each change, for
        `timeout` seconds or for ever.

        With `since`, the version of a list, only for what has changed after it. Cut connections and
        versions that are gone (410) are mended here: nothing is missed but the states in between.
        """
        place = None if all_namespaces else namespace or self.namespace
        return watch.watch(
            self._transport,
            self.list_with_version,
            api_version,
            kind,
            namespace=place,
            selector=selector,
            field_selector=field_selector,
            timeout=timeout,
            version=since,
        )

    def _ask(self, method: str, verb: str, api_version: str, kind: str, **where: Any) -> Document:
        return self._transport.send(
            self._request(method, verb, api_version, kind, **where)
        ).document()

    def _request(
        self,
        method: str,
        verb: str,
        api_version: str,
        kind: str,
        *,
        name: str = "",
        namespace: str | None = None,
        subresource: str = "",
        query: Sequence[tuple[str, str]] = (),
    ) -> ApiRequest:
        place = namespace or self.namespace
        what = f"{verb} {resources.named(api_version, kind)}{f'/{name}' if name else ''}"
        return ApiRequest(
            method,
            resources.path(api_version, kind, namespace=place, name=name, subresource=subresource),
            what,
            query,
        )


def _carry(request: ApiRequest, body: Mapping[str, Any], content_type: str) -> ApiRequest:
    return replace(request, body=body, content_type=content_type)


def _dry(dry_run: bool) -> list[tuple[str, str]]:
    return [("dryRun", "All")] if dry_run else []

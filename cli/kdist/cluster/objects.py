"""The requests on Kubernetes objects: get, list, watch, and those that change one, `send_…`. The
objects of a job are changed through `JobObjects` only, which checks them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kdist.cluster import resources
from kdist.cluster.api_errors import ApiNotFoundError
from kdist.cluster.concurrency import identify
from kdist.cluster.object_lists import ObjectLists
from kdist.cluster.transport import ApiRequest, ApiResponse, Transport
from kdist.manifest import Manifest

FIELD_MANAGER = "kdist"

Document = dict[str, Any]


class Objects(ObjectLists):
    """The objects of one cluster.

    Every method names objects by `api_version`, `kind`, `name` and `namespace` (None for the
    connection's own). Empty selectors match everything. All raise `ApiError` if the server rejects
    the request, and `KdistError` (UNREACHABLE) if it cannot be reached.
    """

    def __init__(
        self, transport: Transport, namespace: str, *, field_manager: str = FIELD_MANAGER
    ) -> None:
        super().__init__(transport, namespace)
        self.field_manager = field_manager

    def get(
        self,
        api_version: str,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> Document:
        """Fetch an object, or a subresource of it. Raises `ApiNotFoundError` if there is none."""
        return self._ask(
            "GET", "get", api_version, kind, name=name, namespace=namespace, subresource=subresource
        )

    def find(self, manifest: Manifest) -> Document | None:
        """The object on the server, None if it does not exist. Raises `ApiNotFoundError` if the
        server does not know its kind.
        """
        try:
            return self.get(manifest.api_version, manifest.kind, manifest.name, manifest.namespace)
        except ApiNotFoundError as error:
            if not error.details.get("name"):
                raise  # the kind is missing, not the object
            return None

    def send_apply(self, manifest: Manifest, *, dry_run: bool, force: bool) -> ApiResponse:
        """Send an object by server-side apply as the connection's field manager."""
        query = [
            ("fieldManager", self.field_manager),
            ("force", "true" if force else "false"),
            *_dry_run_query(dry_run),
        ]
        where: dict[str, Any] = {"name": manifest.name, "namespace": manifest.namespace}
        request = self._request(
            "PATCH", "apply", manifest.api_version, manifest.kind, query=query, **where
        )
        return self._transport.send(
            _with_body(request, manifest.document, "application/apply-patch+yaml")
        )

    def send_create(
        self,
        document: Mapping[str, Any],
        *,
        namespace: str | None = None,
        name: str = "",
        subresource: str = "",
        dry_run: bool = False,
        again: bool = True,
    ) -> Document:
        """Create an object. `again` says whether a failed request may be repeated.

        With `name` and `subresource` it creates a subresource of a pod, such as an eviction.
        """
        api_version, kind = document["apiVersion"], document["kind"]
        if subresource:  # POST …/pods/NAME/eviction: the path is the parent's
            api_version, kind = "v1", "Pod"
        metadata = document.get("metadata") or {}
        scope = namespace or metadata.get("namespace")
        request = self._request(
            "POST",
            "create",
            api_version,
            kind,
            name=name,
            namespace=scope,
            subresource=subresource,
            query=_dry_run_query(dry_run),
        )
        return self._transport.send(
            _with_body(replace(request, again=again), document, "application/json")
        ).document()

    def send_patch(
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
        """Change some fields of an object, or of a subresource of it; returns the changed object.

        `body` is a merge patch: null removes a field, a list replaces the whole list.
        """
        request = self._request(
            "PATCH",
            "patch",
            api_version,
            kind,
            name=name,
            namespace=namespace,
            subresource=subresource,
            query=[("fieldManager", self.field_manager), *_dry_run_query(dry_run)],
        )
        return self._transport.send(
            _with_body(request, body, "application/merge-patch+json")
        ).document()

    def send_delete(
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
        """Delete an object; False if it does not exist.

        `propagation` is `Background`, `Foreground` or `Orphan`, `grace` the grace period of a pod
        in seconds instead of that in its spec. `only` is the object as it was read; if it has
        changed or been replaced since, the server answers 409.
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
            self._transport.send(_with_body(request, options, "application/json"))
        except ApiNotFoundError:
            return False
        return True

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
        scope = namespace or self.namespace
        what = f"{verb} {resources.named(api_version, kind)}{f'/{name}' if name else ''}"
        return ApiRequest(
            method,
            resources.path(api_version, kind, namespace=scope, name=name, subresource=subresource),
            what,
            query,
        )


def _with_body(request: ApiRequest, body: Mapping[str, Any], content_type: str) -> ApiRequest:
    return replace(request, body=body, content_type=content_type)


def _dry_run_query(dry_run: bool) -> list[tuple[str, str]]:
    return [("dryRun", "All")] if dry_run else []

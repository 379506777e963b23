"""Many objects at once: listed page by page, or watched."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from kdist.cluster import resources, watch
from kdist.cluster.api_errors import ApiError
from kdist.cluster.transport import MOST_BYTES, ApiRequest, ResponseTooLargeError, Transport
from kdist.cluster.watch import Trim, keep

PAGE = 500
PAGE_BYTES = 2 << 20
"""Of a page with several objects. Parsed, an object can take forty times its bytes, and whoever may
create objects chooses their size.
"""

Document = dict[str, Any]


class ObjectLists:
    """The lists of one cluster's objects, and what changes in them. Arguments and errors are those
    of `kdist.cluster.objects.Objects`.
    """

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self.namespace = namespace

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
        """List the objects of a kind, in the server's order; with `metadata_only` nothing but
        their metadata.
        """
        scope = None if all_namespaces else namespace or self.namespace
        return self.list_with_version(
            api_version,
            kind,
            namespace=scope,
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
        trim: Trim = keep,
    ) -> tuple[builtins.list[Document], str]:
        """The arguments are those of `list`, except that namespace None means all namespaces, and
        that of each object only what `trim` returns is kept in memory.

        Returns:
            The objects, and the resourceVersion of the list, from which a watch continues.
        """
        chosen = [("labelSelector", selector), ("fieldSelector", field_selector)]
        query = [(key, value) for key, value in chosen if value]
        request = ApiRequest(
            "GET",
            resources.path(api_version, kind, namespace=namespace),
            f"list {resources.named(api_version, kind)}",
            [("limit", str(PAGE)), *query],
            accept=watch.METADATA_LIST if metadata_only else "application/json",
            most=PAGE_BYTES,
        )
        found: list[Document] = []
        size, after = PAGE, ""
        while True:
            try:
                page = self._transport.send(request).document()
            except ResponseTooLargeError:
                if size == 1 or request.query == query:
                    raise
                size = max(1, size // 4)
                request = _limit(request, query, size, after)
                continue
            except ApiError as error:
                if error.status != HTTPStatus.GONE or request.query == query:
                    raise
                # The version that the pages belong to has expired: list everything in one page, as
                # Kubernetes' own clients do.
                found, request = [], replace(request, query=query, most=MOST_BYTES)
                continue
            # The items of a list come without their kind.
            found += [
                trim({**item, "apiVersion": api_version, "kind": kind})
                for item in page.get("items") or []
            ]
            metadata = page.get("metadata") or {}
            after = str(metadata.get("continue") or "")
            if not after:
                return found, str(metadata.get("resourceVersion") or "")
            request = _limit(request, query, size, after)

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
        """Watch objects for `timeout` seconds, or without limit.

        Yields (ADDED | MODIFIED | DELETED, object) for those that exist, then for every change;
        with `since`, the resourceVersion of a list, only the changes after it. It survives lost
        connections and expired versions (410) without missing a final state.
        """
        scope = None if all_namespaces else namespace or self.namespace
        return watch.watch(
            self._transport,
            self.list_with_version,
            api_version,
            kind,
            namespace=scope,
            selector=selector,
            field_selector=field_selector,
            timeout=timeout,
            version=since,
        )

    def follow(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None,
        selector: str = "",
        since: str,
        metadata_only: bool = False,
        trim: Trim = keep,
    ) -> Iterator[tuple[str, Document]]:
        """Every change after the resourceVersion `since` of `list_with_version`, whose arguments
        these are, for whoever keeps a copy of the objects.

        Yields (ADDED | MODIFIED | DELETED, object), and (BOOKMARK, {}) whenever the server has
        shown that nothing was missed. It survives lost connections. Raises `ApiError` with status
        410 when `since` has expired: the objects must be listed again.
        """
        return watch.follow(
            self._transport,
            api_version,
            kind,
            namespace=namespace,
            selector=selector,
            version=since,
            metadata_only=metadata_only,
            trim=trim,
        )


def _limit(
    request: ApiRequest, query: builtins.list[tuple[str, str]], size: int, after: str
) -> ApiRequest:
    """The request for a page of so many objects, after those of an earlier one."""
    place = [("continue", after)] if after else []
    most = PAGE_BYTES if size > 1 else MOST_BYTES
    return replace(request, query=[("limit", str(size)), *query, *place], most=most)

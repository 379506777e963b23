"""The lists of a cluster's objects, and watches of what changes in them.

A watch keeps its position with bookmarks, is reopened after a lost connection, and lists the
objects again when its resourceVersion has expired.
"""

from __future__ import annotations

import builtins
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from kdist.cluster import resources
from kdist.cluster.api_errors import ApiError
from kdist.cluster.transport import (
    FIRST_PAUSE,
    JITTER,
    MOST_BYTES,
    ApiRequest,
    ResponseTooLargeError,
    Transport,
    deadline,
    read_lines,
)
from kdist.status import documents
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json

PAGE = 500
PAGE_BYTES = 2 << 20
"""Of a page with several objects. Parsed, an object can take forty times its bytes, and whoever may
create objects chooses their size.
"""

# The server ends a watch after ROUND_SECONDS. A connection that sends nothing for SILENCE_SECONDS
# longer is dead: load balancers and suspended machines drop connections without closing them.
ROUND_SECONDS, SILENCE_SECONDS = 50, 10
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

Document = dict[str, Any]
Trim = Callable[[Document], Document]
"""Leaves of an object what its reader needs."""


def keep(document: Document) -> Document:
    """The whole object."""
    return document


class ObjectLists:
    """The lists of one cluster's objects, and what changes in them. Arguments and errors are those
    of `kdist.cluster.client.Objects`.
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
            metadata_only=metadata_only,
        )[0]

    def list_with_version(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None,
        selector: str = "",
        metadata_only: bool = False,
        trim: Trim = keep,
    ) -> tuple[builtins.list[Document], str]:
        """The objects, and the resourceVersion of the list, from which a watch continues. The
        arguments are those of `list`, except that namespace None means all namespaces, and that of
        each object only what `trim` returns is kept in memory.
        """
        query = _select(selector)
        request = ApiRequest(
            "GET",
            resources.path(api_version, kind, namespace=namespace),
            f"list {resources.named(api_version, kind)}",
            [("limit", str(PAGE)), *query],
            accept=_METADATA_LIST if metadata_only else "application/json",
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
        selector: str = "",
        timeout: float | None = None,
    ) -> Iterator[tuple[str, Document]]:
        """Watch objects of the namespace for `timeout` seconds, or without limit.

        Yields (ADDED | MODIFIED | DELETED, object) for those that exist, then for every change. It
        survives lost connections and expired versions (410) without missing a final state.
        """
        query: dict[str, Any] = {"namespace": self.namespace, "selector": selector}
        end, known = deadline(timeout), dict[str, Document]()
        while True:
            listed, version = self.list_with_version(api_version, kind, **query)
            yield from _compare(known, listed)
            try:
                for change, document in self.follow(
                    api_version, kind, **query, since=version, end=end
                ):
                    if change == "DELETED":
                        known.pop(documents.uid(document), None)
                    else:
                        known[documents.uid(document)] = document
                    yield change, document
                return
            except ApiError as error:
                if error.status != HTTPStatus.GONE:
                    raise

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
        end: float = math.inf,
    ) -> Iterator[tuple[str, Document]]:
        """Every change after the resourceVersion `since` of `list_with_version`, whose arguments
        these are, until the monotonic time `end`, for whoever keeps a copy of the objects.

        Yields (ADDED | MODIFIED | DELETED, object). It survives lost connections. Raises `ApiError`
        with status 410 when `since` has expired: the objects must be listed again.
        """
        while (left := end - time.monotonic()) > 0:
            seconds = max(1, math.ceil(min(left, ROUND_SECONDS * JITTER.uniform(0.9, 1.1))))
            query = [
                ("watch", "1"),
                ("allowWatchBookmarks", "true"),
                ("resourceVersion", since),
                ("timeoutSeconds", str(seconds)),
            ]
            request = ApiRequest(
                "GET",
                resources.path(api_version, kind, namespace=namespace),
                f"watch {resources.named(api_version, kind)}",
                [*query, *_select(selector)],
                timeout=seconds + SILENCE_SECONDS,
            )
            if metadata_only:
                request = replace(request, accept=_METADATA)
            try:
                for change, document in self._events(request):
                    since = document["metadata"]["resourceVersion"]
                    if change != "BOOKMARK":
                        yield change, trim({**document, "apiVersion": api_version, "kind": kind})
                    if time.monotonic() >= end:
                        return
            except ConnectionError:
                # do not busy-loop against a server that closes every watch at once; the next
                # request continues from the last version, and reports an outage
                time.sleep(FIRST_PAUSE)

    def _events(self, request: ApiRequest) -> Iterator[tuple[str, Document]]:
        """Events of one connection. Raises `ApiError` for an event of type ERROR."""
        for line in read_lines(self._transport.open(request)):
            try:
                event = parse_json(line)
                change, document = str(event["type"]), dict(event["object"])
            except (ValueError, KeyError, TypeError):
                raise ConnectionError("a watch was cut within a line") from None
            if change == "ERROR":
                code = document.get("code")
                status = code if isinstance(code, int) else 500
                if status >= 500:
                    raise ConnectionError(str(document.get("message")))
                body = encode_json(document).encode()
                raise self._transport.explain(request.description, status, body)
            yield change, document


def _select(selector: str) -> builtins.list[tuple[str, str]]:
    return [("labelSelector", selector)] if selector else []


def _limit(
    request: ApiRequest, query: builtins.list[tuple[str, str]], size: int, after: str
) -> ApiRequest:
    """The request for a page of so many objects, after those of an earlier one."""
    place = [("continue", after)] if after else []
    most = PAGE_BYTES if size > 1 else MOST_BYTES
    return replace(request, query=[("limit", str(size)), *query, *place], most=most)


def _compare(known: dict[str, Document], listed: list[Document]) -> Iterator[tuple[str, Document]]:
    """Yield the changes from the known objects to the listed ones, and update `known`."""
    present = {documents.uid(each): each for each in listed}
    for uid in [uid for uid in known if uid not in present]:
        yield "DELETED", known.pop(uid)
    for uid, document in present.items():
        before = known.get(uid)
        known[uid] = document
        if before is None:
            yield "ADDED", document
        elif before["metadata"].get("resourceVersion") != document["metadata"].get(
            "resourceVersion"
        ):
            yield "MODIFIED", document

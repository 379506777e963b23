"""Watches and container logs, line by line from responses that the API server is still writing.

A watch keeps its position with bookmarks, is reopened after a lost connection, and lists the
objects again when its resourceVersion has expired. A log that is followed continues after a lost
connection without lost or repeated lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from kdist.cluster import resources
from kdist.cluster.api_errors import ApiError, ApiNotFoundError, explain
from kdist.cluster.transport import FIRST_PAUSE, JITTER, ApiRequest, Transport, deadline, reason
from kdist.errors import Code, KdistError
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json

MOST_LINE_BYTES = 4 << 20
"""More of a line is dropped."""


def read_lines(response: Any) -> Iterator[bytes]:
    """Yield lines without their line ends as they arrive, including an unterminated last one.

    Raises:
        ConnectionError: the connection was lost, or timed out.
    """
    import urllib3

    rest = bytearray()
    try:
        for piece in response.stream(2**16, decode_content=False):
            *lines, tail = piece.split(b"\n")
            for line in lines:
                rest += line
                yield bytes(rest)
                rest.clear()
            rest += tail
            del rest[MOST_LINE_BYTES:]
    except urllib3.exceptions.HTTPError as error:
        raise ConnectionError(reason(error)) from error
    finally:
        # A connection whose response was not read to its end cannot be reused.
        response.close()
        response.release_conn()
    if rest:
        yield bytes(rest)


Document = dict[str, Any]
Trim = Callable[[Document], Document]
"""Leaves of an object what its reader needs."""
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

# The server ends a watch after ROUND_SECONDS. A connection that sends nothing for SILENCE_SECONDS
# longer is dead: load balancers and suspended machines drop connections without closing them.
ROUND_SECONDS, SILENCE_SECONDS = 50, 10
GONE = 410


class Lister(Protocol):
    """Lists objects, with the resourceVersion from which a watch continues."""

    def __call__(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None,
        selector: str,
        field_selector: str,
    ) -> tuple[list[Document], str]:
        """The objects and the resourceVersion."""


def watch(
    transport: Transport,
    lister: Lister,
    api_version: str,
    kind: str,
    *,
    namespace: str | None,
    selector: str,
    field_selector: str,
    timeout: float | None,
    version: str = "",
) -> Iterator[tuple[str, Document]]:
    """Watch objects: first those that exist, then every change.

    Args:
        transport: connection to the API server.
        lister: lists the objects at the start, and again when the version has expired.
        api_version: of the objects.
        kind: of the objects.
        namespace: of the objects; None for all namespaces.
        selector: label selector.
        field_selector: field selector.
        timeout: in seconds; None watches without limit.
        version: resourceVersion of a list; yields only the changes after it.

    Yields:
        (`ADDED`, `MODIFIED` or `DELETED`, object).
    """
    end = deadline(timeout)
    known: dict[str, Document] = {}
    while True:
        if not version:
            listed, version = lister(
                api_version,
                kind,
                namespace=namespace,
                selector=selector,
                field_selector=field_selector,
            )
            yield from _compare(known, listed)
        left = end - time.monotonic()
        if left <= 0:
            return
        chosen = {"labelSelector": selector, "fieldSelector": field_selector}
        request = _make_request(api_version, kind, namespace, chosen, version=version, left=left)
        try:
            for change, document in _events(transport, request):
                version = document["metadata"]["resourceVersion"]
                if change == "BOOKMARK":
                    continue
                _record(known, change, document)
                yield change, document
                if time.monotonic() >= end:
                    return
        except ConnectionError:
            # do not busy-loop against a server that closes every watch at once
            time.sleep(FIRST_PAUSE)
            # continue from the last version; the next request reports an outage
            continue
        except ApiError as error:
            if error.status != GONE:
                raise
            version = ""


def keep(document: Document) -> Document:
    """The whole object."""
    return document


def follow(
    transport: Transport,
    api_version: str,
    kind: str,
    *,
    namespace: str | None,
    selector: str,
    version: str,
    metadata_only: bool = False,
    trim: Trim = keep,
) -> Iterator[tuple[str, Document]]:
    """Watch objects without a memory of them, which is the caller's.

    Args:
        transport: connection to the API server.
        api_version: of the objects.
        kind: of the objects.
        namespace: of the objects; None for all namespaces.
        selector: label selector.
        version: resourceVersion of a list; yields only the changes after it.
        metadata_only: nothing but the metadata of the objects.
        trim: applied to each object.

    Yields:
        (`ADDED`, `MODIFIED` or `DELETED`, object), and (`BOOKMARK`, {}) when a round has ended or
        the server has sent one.

    Raises:
        ApiError: with status 410, the version has expired.
    """
    while True:
        chosen = {"labelSelector": selector}
        request = _make_request(
            api_version, kind, namespace, chosen, version=version, left=math.inf
        )
        if metadata_only:
            request = replace(request, accept=_METADATA)
        try:
            for change, document in _events(transport, request):
                version = document["metadata"]["resourceVersion"]
                if change != "BOOKMARK":
                    yield change, trim({**document, "apiVersion": api_version, "kind": kind})
                else:
                    yield change, {}
        except ConnectionError:
            time.sleep(FIRST_PAUSE)
            continue
        yield "BOOKMARK", {}


def _make_request(
    api_version: str,
    kind: str,
    namespace: str | None,
    selectors: Mapping[str, str],
    *,
    version: str,
    left: float,
) -> ApiRequest:
    """A watch from this version on, for one round or for `left` seconds."""
    seconds = max(1, math.ceil(min(left, ROUND_SECONDS * JITTER.uniform(0.9, 1.1))))
    query = [
        ("watch", "1"),
        ("allowWatchBookmarks", "true"),
        ("resourceVersion", version),
        ("timeoutSeconds", str(seconds)),
    ]
    return ApiRequest(
        "GET",
        resources.path(api_version, kind, namespace=namespace),
        f"watch {resources.named(api_version, kind)}",
        [*query, *((key, value) for key, value in selectors.items() if value)],
        timeout=seconds + SILENCE_SECONDS,
    )


def _events(transport: Transport, request: ApiRequest) -> Iterator[tuple[str, Document]]:
    """Events of one connection. Raises `ApiError` for an event of type ERROR."""
    for line in read_lines(transport.open(request)):
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
            access = transport.access
            body = encode_json(document).encode()
            raise explain(
                status, body, what=request.what, namespace=access.namespace, context=access.context
            )
        yield change, document


def _record(known: dict[str, Document], change: str, document: Document) -> None:
    if change == "DELETED":
        known.pop(document["metadata"]["uid"], None)
    else:
        known[document["metadata"]["uid"]] = document


def _compare(known: dict[str, Document], listed: list[Document]) -> Iterator[tuple[str, Document]]:
    """Yield the changes from the known objects to the listed ones, and update `known`."""
    present = {each["metadata"]["uid"]: each for each in listed}
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


# A training may print nothing for a long time, and TCP keep-alive does not detect a dead load
# balancer: after this many seconds the log is requested again. A log that is there comes at once.
LOG_SILENCE_SECONDS = 300.0
_LOG_BYTES = 4096


class LogCutError(KdistError, ConnectionError):
    """The log did not come to its end."""


class LogQuery(NamedTuple):
    """Which log to read, and how much of it.

    Attributes:
        pod: name of the pod.
        namespace: of the pod.
        container: name of the container.
        follow: continue until the container ends.
        previous: read the log of the previous container.
        tail: number of last lines; None for all.
        since: seconds back, or a time as RFC 3339 text; None for the beginning.
        timestamps: put the time before each line.
    """

    pod: str
    namespace: str
    container: str
    follow: bool
    previous: bool
    tail: int | None
    since: float | str | None
    timestamps: bool


def read(transport: Transport, wanted: LogQuery) -> Iterator[str]:
    """Yield the lines of a log; with `follow` until the container has ended."""
    last = ""
    container_id = _running_container(transport, wanted) if wanted.follow else ""
    while True:
        resumed_at = last
        try:
            for raw in read_lines(transport.open(_request(wanted, last))):
                stamp, _, line = raw.decode(errors="replace").rstrip("\r").partition(" ")
                # all of the kubelet's timestamps have one format, so their text compares as time
                if stamp <= resumed_at:
                    continue
                # the kubelet's own messages about a deleted pod have no timestamp
                if stamp[:1].isdigit():
                    last = stamp
                yield f"{stamp} {line}" if wanted.timestamps else line
        except ConnectionError as error:
            if not wanted.follow:
                raise LogCutError(
                    f"read the log of pod/{wanted.pod}: it was cut off: {error}",
                    code=Code.UNREACHABLE,
                ) from error
        if not wanted.follow:
            return
        now = _running_container(transport, wanted)
        if not now or (container_id and now != container_id):
            return
        container_id = now


def _request(wanted: LogQuery, last: str) -> ApiRequest:
    query = [("container", wanted.container), ("timestamps", "true")]
    if wanted.follow:
        query.append(("follow", "true"))
    if wanted.previous:
        query.append(("previous", "true"))
    if last:
        query.append(("sinceTime", last))
    else:
        if wanted.tail is not None:
            query.append(("tailLines", str(wanted.tail)))
        if isinstance(wanted.since, str):
            query.append(("sinceTime", wanted.since))
        elif wanted.since is not None:
            query.append(("sinceSeconds", str(max(1, round(wanted.since)))))
    return ApiRequest(
        "GET",
        resources.path("v1", "Pod", namespace=wanted.namespace, name=wanted.pod, subresource="log"),
        f"read the log of pod/{wanted.pod}",
        query,
        accept="*/*",
        timeout=LOG_SILENCE_SECONDS if wanted.follow else None,
        each=1 if wanted.follow else _LOG_BYTES,
    )


def _running_container(transport: Transport, wanted: LogQuery) -> str:
    """Id of the running container; empty if it does not run."""
    path = resources.path("v1", "Pod", namespace=wanted.namespace, name=wanted.pod)
    try:
        pod = transport.send(ApiRequest("GET", path, f"get pods/{wanted.pod}")).document()
    except ApiNotFoundError:
        return ""
    found = pod.get("status") or {}
    kinds = ("containerStatuses", "initContainerStatuses")
    statuses: list[dict[str, Any]] = [each for kind in kinds for each in found.get(kind) or []]
    for status in statuses:
        if status.get("name") == wanted.container and "running" in (status.get("state") or {}):
            return str(status.get("containerID") or "")
    return ""

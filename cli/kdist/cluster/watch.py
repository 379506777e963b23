"""Watches and container logs, line by line from responses that the API server is still writing.

A watch keeps its place with bookmarks, is opened again after a cut connection, and lists the
objects again when its resourceVersion has expired. A log that is followed continues after a cut
connection without lost or repeated lines.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kdist.cluster import resources, retry
from kdist.cluster.api_errors import ApiError, ApiNotFoundError, explain
from kdist.cluster.transport import ApiRequest, Transport, deadline


def read_lines(response: Any) -> Iterator[bytes]:
    """Whole lines without their ends, as they come; the last one too if nothing ends it.

    Raises `ConnectionError` where the connection is cut or stays silent longer than its time-out.
    """
    import urllib3

    rest = b""
    try:
        for piece in response.stream(2**16, decode_content=True):
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
    except urllib3.exceptions.HTTPError as error:
        raise ConnectionError(str(error)) from error
    finally:
        # A connection whose answer was not read to its end is of no further use.
        response.close()
        response.release_conn()
    if rest:
        yield rest


Document = dict[str, Any]

# The server ends a watch after this many seconds, and a connection that says nothing for some more
# is dead: a balancer or a sleeping laptop cuts without a word.
ROUND_SECONDS, SILENCE_SECONDS = 50, 10
GONE = 410


class Lister(Protocol):
    """Lists objects and says from which version a watch goes on."""

    def __call__(
        self,
        api_version: str,
        kind: str,
        *,
        namespace: str | None,
        selector: str,
        field_selector: str,
    ) -> tuple[list[Document], str]:
        """The objects and the version."""


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
    """(ADDED | MODIFIED | DELETED, object): first what is there, then every change, for `timeout`
    seconds or for ever.

    With a `version` what is there is known already, and the changes since then come at once.
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
                _note(known, change, document)
                yield change, document
                if time.monotonic() >= end:
                    return
        except ConnectionError:
            # a server that cuts each watch at once is not asked without end
            time.sleep(retry.FIRST_PAUSE)
            # from the last version seen; an outage shows, and is told of, in the next request
            continue
        except ApiError as error:
            if error.status != GONE:
                raise
            version = ""


def _make_request(
    api_version: str,
    kind: str,
    namespace: str | None,
    selectors: Mapping[str, str],
    *,
    version: str,
    left: float,
) -> ApiRequest:
    """A watch from this version on, for one round or the `left` seconds."""
    seconds = max(1, math.ceil(min(left, ROUND_SECONDS * retry.JITTER.uniform(0.9, 1.1))))
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
    """Events of one connection. Raises `ApiError` for an error that comes as an event."""
    for line in read_lines(transport.open(request, stream=True)):
        try:
            event = json.loads(line)
            change, document = str(event["type"]), dict(event["object"])
        except (ValueError, KeyError, TypeError):
            raise ConnectionError("a watch was cut within a line") from None
        if change == "ERROR":
            code = document.get("code")
            status = code if isinstance(code, int) else 500
            if status >= 500:
                raise ConnectionError(str(document.get("message")))
            access = transport.access
            body = json.dumps(document).encode()
            raise explain(
                status, body, what=request.what, namespace=access.namespace, context=access.context
            )
        yield change, document


def _note(known: dict[str, Document], change: str, document: Document) -> None:
    if change == "DELETED":
        known.pop(document["metadata"]["uid"], None)
    else:
        known[document["metadata"]["uid"]] = document


def _compare(known: dict[str, Document], listed: list[Document]) -> Iterator[tuple[str, Document]]:
    """What changed between what was known and what is listed now; `known` is brought up to date on
    the way.
    """
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


# A training may have nothing to say for long, and TCP's keep-alive is not enough to notice a dead
# balancer: ask again.
LOG_SILENCE_SECONDS = 300.0


@dataclass(frozen=True)
class LogQuery:
    """Which log, and how much of it. `since`: seconds back, or a moment as RFC 3339 text."""

    pod: str
    namespace: str
    container: str
    follow: bool
    previous: bool
    tail: int | None
    since: float | str | None
    timestamps: bool


def read(transport: Transport, wanted: LogQuery) -> Iterator[str]:
    """Lines of the log; with `follow` until the container has ended."""
    last = ""
    container_id = _running(transport, wanted) if wanted.follow else ""
    while True:
        resumed_at = last
        try:
            for raw in read_lines(transport.open(_request(wanted, last), stream=True)):
                stamp, _, line = raw.decode(errors="replace").rstrip("\r").partition(" ")
                # the kubelet writes all stamps in one form, so that text compares as time
                if stamp <= resumed_at:
                    continue
                # the kubelet's own words about a pod that goes have no stamp
                if stamp[:1].isdigit():
                    last = stamp
                yield f"{stamp} {line}" if wanted.timestamps else line
        except ConnectionError:
            if not wanted.follow:
                raise
        if not wanted.follow:
            return
        now = _running(transport, wanted)
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
    )


def _running(transport: Transport, wanted: LogQuery) -> str:
    """Id of the container while it runs; empty when it does not."""
    path = resources.path("v1", "Pod", namespace=wanted.namespace, name=wanted.pod)
    try:
        pod = transport.send(ApiRequest("GET", path, f"get pods/{wanted.pod}")).document()
    except ApiNotFoundError:
        return ""
    statuses: list[dict[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or []
    for status in statuses:
        if status.get("name") == wanted.container and "running" in (status.get("state") or {}):
            return str(status.get("containerID") or "")
    return ""

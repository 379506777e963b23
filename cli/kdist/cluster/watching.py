"""A watch that goes on: bookmarks keep its place, a cut connection is followed up, and a place that is gone is listed anew."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

from kdist.cluster import outage, resources
from kdist.cluster.lines import read_lines
from kdist.cluster.refusal import RefusalError, explain
from kdist.cluster.transport import Request, Transport, deadline

Document = dict[str, Any]

# The server ends a watch after this many seconds, and a connection that says nothing for some more is dead: a balancer or a
# sleeping laptop cuts without a word.
ROUND_SECONDS, SILENCE_SECONDS = 50, 10
GONE = 410


class Lister(Protocol):
    """Lists objects and says from which version a watch goes on."""

    def __call__(
        self, api_version: str, kind: str, *, namespace: str | None, selector: str, field_selector: str
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
    """(ADDED | MODIFIED | DELETED, object): first what is there, then every change, for `timeout` seconds or for ever.

    With a `version` what is there is known already, and the changes since then come at once.
    """
    end = deadline(timeout)
    known: dict[str, Document] = {}
    while True:
        if not version:
            listed, version = lister(api_version, kind, namespace=namespace, selector=selector, field_selector=field_selector)
            yield from _compare(known, listed)
        left = end - time.monotonic()
        if left <= 0:
            return
        seconds = max(1, math.ceil(min(left, ROUND_SECONDS * outage.JITTER.uniform(0.9, 1.1))))
        chosen = [("labelSelector", selector), ("fieldSelector", field_selector)]
        query = [("watch", "1"), ("allowWatchBookmarks", "true"), ("resourceVersion", version), ("timeoutSeconds", str(seconds))]
        request = Request(
            "GET",
            resources.path(api_version, kind, namespace=namespace),
            f"watch {resources.named(api_version, kind)}",
            [*query, *((key, value) for key, value in chosen if value)],
            timeout=seconds + SILENCE_SECONDS,
        )
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
            time.sleep(outage.FIRST_PAUSE)  # a server that cuts each watch at once is not asked without end
            continue  # from the last version seen; an outage shows, and is told of, in the next request
        except RefusalError as error:
            if error.status != GONE:
                raise
            version = ""


def _events(transport: Transport, request: Request) -> Iterator[tuple[str, Document]]:
    """Events of one connection. Raises `RefusalError` for an error that comes as an event."""
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
            raise explain(status, body, what=request.what, namespace=access.namespace, context=access.context)
        yield change, document


def _note(known: dict[str, Document], change: str, document: Document) -> None:
    if change == "DELETED":
        known.pop(document["metadata"]["uid"], None)
    else:
        known[document["metadata"]["uid"]] = document


def _compare(known: dict[str, Document], listed: list[Document]) -> Iterator[tuple[str, Document]]:
    """What changed between what was known and what is listed now; `known` is brought up to date on the way."""
    present = {each["metadata"]["uid"]: each for each in listed}
    for uid in [uid for uid in known if uid not in present]:
        yield "DELETED", known.pop(uid)
    for uid, document in present.items():
        before = known.get(uid)
        known[uid] = document
        if before is None:
            yield "ADDED", document
        elif before["metadata"].get("resourceVersion") != document["metadata"].get("resourceVersion"):
            yield "MODIFIED", document

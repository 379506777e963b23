"""A container's log, line by line; while it is followed, a cut connection is taken up again without losing or doubling lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdist.cluster import resources
from kdist.cluster.lines import read_lines
from kdist.cluster.refusal import MissingError
from kdist.cluster.transport import Request, Transport

# A training may have nothing to say for long, and TCP's keep-alive is not enough to notice a dead balancer: ask again.
SILENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Wanted:
    """Which log, and how much of it. `since`: seconds back, or a moment as RFC 3339 text."""

    pod: str
    namespace: str
    container: str
    follow: bool
    previous: bool
    tail: int | None
    since: float | str | None
    timestamps: bool


def read(transport: Transport, wanted: Wanted) -> Iterator[str]:
    """Lines of the log; with `follow` until the container has ended."""
    last = ""
    container_id = _running(transport, wanted) if wanted.follow else ""
    while True:
        resumed_at = last
        try:
            for raw in read_lines(transport.open(_request(wanted, last), stream=True)):
                stamp, _, line = raw.decode(errors="replace").rstrip("\r").partition(" ")
                if stamp <= resumed_at:  # the kubelet writes all stamps in one form, so that text compares as time
                    continue
                if stamp[:1].isdigit():  # the kubelet's own words about a pod that goes have no stamp
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


def _request(wanted: Wanted, last: str) -> Request:
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
    return Request(
        "GET",
        resources.path("v1", "Pod", namespace=wanted.namespace, name=wanted.pod, subresource="log"),
        f"read the log of pod/{wanted.pod}",
        query,
        accept="*/*",
        timeout=SILENCE_SECONDS if wanted.follow else None,
    )


def _running(transport: Transport, wanted: Wanted) -> str:
    """Id of the container while it runs; empty when it does not."""
    path = resources.path("v1", "Pod", namespace=wanted.namespace, name=wanted.pod)
    try:
        pod = transport.send(Request("GET", path, f"get pods/{wanted.pod}")).document()
    except MissingError:
        return ""
    statuses: list[dict[str, Any]] = (pod.get("status") or {}).get("containerStatuses") or []
    for status in statuses:
        if status.get("name") == wanted.container and "running" in (status.get("state") or {}):
            return str(status.get("containerID") or "")
    return ""

"""The logs of a run on this machine, of all its agents and ranks in the order of their times,
the events among their lines, and when they tell that its agents started. They are read here;
`kdist_trainer.agent.logs` writes and rotates them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kdist.events import Entry, EventFilter, LogTail, describe_event, parse, read_timed
from kdist.job.local.job import LocalJob
from kdist_trainer.formats import CLI_API_VERSION

_POLL_SECONDS = 0.3


def read_entries(
    job: LocalJob,
    *,
    follow: bool,
    since: float | None,
    tail: int | None,
    node: str | None = None,
    until: float = float("inf"),
) -> Iterator[Entry]:
    """Yield what the agents and ranks of all invocations have written.

    Args:
        job: the run.
        follow: go on until its `kdist run` has ended.
        since: only what was written in the last seconds; None for all.
        tail: only the last entries of each node; None for all.
        node: only this node, or this fetch, such as `fetch-data-0`; None for all.
        until: the monotonic time at which following ends.
    """
    tails: dict[str, LogTail] = {}
    oldest = None if since is None else time.time() - since
    first = True
    while True:
        active = job.active
        for log in (*job.root.glob("fetch-*/log"), *job.root.glob("node-*/log")):
            name = log.parent.name
            if node is None or name == node:
                tails.setdefault(name, LogTail(name, log, from_start=True))
        found = [read_timed(tails[name], last=not active) for name in sorted(tails)]
        if first and tail is not None:
            found = [entries[len(entries) - min(tail, len(entries)) :] for entries in found]
        timed = sorted((each for entries in found for each in entries), key=lambda each: each[0])
        yield from (entry for at, entry in timed if oldest is None or at >= oldest)
        if not (follow and active) or time.monotonic() >= until:
            return
        first = False
        time.sleep(_POLL_SECONDS)


NORMAL, WARNING = "Normal", "Warning"


def read_events(job: LocalJob, *, follow: bool, types: Collection[str] = ()) -> Iterator[Entry]:
    """Yield the events that are worth a line, of all invocations.

    Args:
        job: the run.
        follow: go on until its `kdist run` has ended.
        types: only events of these types, in lower case; all if empty.
    """
    chosen = EventFilter(lines_only=False)
    for entry in read_entries(job, follow=follow, since=None, tail=None):
        if entry.event is None or not chosen.should_show(entry.event):
            continue
        if not types or type_of(entry).lower() in types:
            yield entry


def type_of(entry: Entry) -> str:
    """The type of the event, as Kubernetes names it."""
    level = (entry.event or {}).get("level", "info")
    return WARNING if level in ("warning", "error") else NORMAL


def to_document(entry: Entry) -> dict[str, Any]:
    """The event with the fields of a Kubernetes Event, and with its own under `event`."""
    event = entry.event or {}
    return {
        "apiVersion": CLI_API_VERSION,
        "kind": "Event",
        "type": type_of(entry),
        "reason": event.get("event"),
        "message": describe_event(event),
        "lastTimestamp": event.get("time"),
        "involvedObject": {"kind": "Agent", "name": entry.node},
        "event": dict(event),
    }


_FIRST_EVENT = b'"rendezvous-started"'
_FETCHED_EVENT = b'"data-ready"'

Lifetime = tuple[float, float | None]


def starts(
    root: Path, lifetimes: Sequence[Lifetime]
) -> Iterator[tuple[float, float | None, float]]:
    """For each active interval of the run and each node: the unix times at which the interval
    began, all data was fetched (None if none was), and the node's agent had started.
    """
    fetched = [at for log in root.glob("fetch-*/log") for at in _times(log, _FETCHED_EVENT)]
    for log in sorted(root.glob("node-*/log")):
        times = list(_times(log, _FIRST_EVENT))
        for lifetime in lifetimes:
            if inside := _select(times, lifetime):
                yield lifetime[0], max(_select(fetched, lifetime), default=None), inside[0]


def _select(times: Sequence[float], lifetime: Lifetime) -> list[float]:
    began, ended = lifetime
    return [at for at in times if began <= at and (ended is None or at <= ended)]


def _times(log: Path, name: bytes) -> Iterator[float]:
    """Unix times of the events of a log with this name."""
    try:
        with log.open("rb") as lines:
            for line in lines:
                event = parse(line.decode(errors="replace")) if name in line else None
                if event is not None:
                    yield datetime.fromisoformat(str(event["time"])).timestamp()
    except (OSError, ValueError, KeyError):
        return

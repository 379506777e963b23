"""The logs of a run on this machine, of all its agents and ranks in the order of their times, and
the events among their lines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from kdist.events import Entry, EventFilter, LogTail, describe_event, read_timed
from kdist.job.local.job import LocalJob
from kdist_trainer.formats import CLI_API_VERSION

_POLL_SECONDS = 0.3
_RANK_PREFIX = re.compile(r"\[rank(\d{1,9})\]:")


def read_entries(
    job: LocalJob,
    *,
    follow: bool,
    since: float | None,
    tail: int | None,
    node: str | None = None,
) -> Iterator[Entry]:
    """Yield what the agents and ranks of all invocations have written.

    Args:
        job: the run.
        follow: go on until its `kdist run` has ended.
        since: only what was written in the last seconds; None for all.
        tail: only the last entries of each node; None for all.
        node: only this node, or this fetch, such as `fetch-data-0`; None for all.
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
        if not (follow and active):
            return
        first = False
        time.sleep(_POLL_SECONDS)


def select_ranks(wanted: Collection[int]) -> Callable[[Entry], bool]:
    """A function that selects the entries of these ranks."""

    def matches(entry: Entry) -> bool:
        prefix = _RANK_PREFIX.match(entry.text)
        rank = entry.event.get("rank") if entry.event else int(prefix[1]) if prefix else None
        return rank in wanted

    return matches


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

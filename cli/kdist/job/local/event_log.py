"""The events of a run on this machine: what its agents and ranks reported, from their logs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from kdist.events import Entry, EventFilter, describe_event
from kdist.job.local import logs
from kdist.job.local.job import LocalJob

NORMAL, WARNING = "Normal", "Warning"


def read_events(job: LocalJob, *, follow: bool, types: Collection[str] = ()) -> Iterator[Entry]:
    """Yield the events that are worth a line, of all invocations.

    Args:
        job: the run.
        follow: go on until its `kdist run` has ended.
        types: only events of these types, in lower case; all if empty.
    """
    chosen = EventFilter(lines_only=False)
    for entry in logs.read_entries(job, follow=follow, since=None, tail=None):
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
        "apiVersion": "cli.kdist.dev/v1",
        "kind": "Event",
        "type": type_of(entry),
        "reason": event.get("event"),
        "message": describe_event(event),
        "lastTimestamp": event.get("time"),
        "involvedObject": {"kind": "Agent", "name": entry.node},
        "event": dict(event),
    }

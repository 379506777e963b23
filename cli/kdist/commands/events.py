"""`kdist events`: the Kubernetes events of a job, or the trainer events of a local run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code
from kdist.terminal import columns

if TYPE_CHECKING:
    from kdist.events import Entry
    from kdist.job.local.job import LocalJob

_POLL_SECONDS = 2.0
_HEADER = ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")
_WIDTHS = (9, 7, 16, 18, 24)  # while later events are not known yet
_RUN_HEADER = ("TIME", *_HEADER[1:])
_RUN_WIDTHS = (20, 7, 21, 8, 24)


@click.command()
@options.job_argument
@click.option("-w", "--watch", is_flag=True, help="Keep watching, and show each new event.")
@click.option(
    "--types", default="", metavar="TYPE,…", help="Only events of these types, e.g. Warning."
)
@options.output_option("table", "json", "yaml")
@options.local_option
@options.cluster_options
def command(
    job: str | None,
    file: str | None,
    *,
    watch: bool,
    types: str,
    output: str,
    local: bool,
    timeout: float | None,
    **cluster_options: Any,
) -> int:
    r"""Show the events of a job.

    The events of its workload, its pods (also deleted ones), its volume claims and its Kueue
    Workload, oldest first. Of a run on this machine, what its agents and ranks report.

    \b
    Examples:
      kdist events digits
      kdist events digits -w
      kdist events -f job.yaml --types=Warning
    """
    from kdist.job import cluster as jobs

    wanted = {each.strip().lower() for each in types.split(",") if each.strip()}
    run = targets.find_local(job, file, local=local, **cluster_options)
    if run is not None:
        return _show_run(run, wanted, output=output, watch=watch)
    found = targets.find_job(job, file)
    cluster = targets.connect(**cluster_options, timeout=timeout, job=found.namespace, stays=watch)
    shown: set[tuple[str, str]] = set()
    table = columns.Table(_HEADER, min_widths=_WIDTHS if watch else ())
    while True:
        events = [
            each
            for each in jobs.fetch_snapshot(cluster, found.name).events
            if not wanted or str(each.get("type") or "").lower() in wanted
        ]
        fresh = sorted((each for each in events if _key(each) not in shown), key=_last_seen)
        shown.update(_key(each) for each in fresh)
        if output != "table":
            _emit(fresh, output=output, stream=watch)
        elif fresh:
            console.add_rows(table, [_row(each) for each in fresh])
        elif not watch:
            console.message(
                f"there are no events for {found.name}; a cluster keeps them for an hour"
            )
        if not watch:
            return Code.OK
        time.sleep(_POLL_SECONDS)


def _show_run(run: LocalJob, types: set[str], *, output: str, watch: bool) -> int:
    """Show the events of a run on this machine; with `watch` until its `kdist run` ends."""
    from kdist.job.local import logs

    found = logs.read_events(run, follow=watch, types=types)
    if output != "table":
        _emit(map(logs.to_document, found), output=output, stream=watch)
        return Code.OK
    table = columns.Table(_RUN_HEADER, min_widths=_RUN_WIDTHS if watch else ())
    rows = map(_run_row, found)
    if watch:
        for row in rows:
            console.add_rows(table, [row])
    elif collected := list(rows):
        console.add_rows(table, collected)
    else:
        console.message(f"there are no such events in the logs of {run.name}")
    return Code.OK


def _run_row(entry: Entry) -> tuple[str, ...]:
    from kdist.events import describe_event
    from kdist.job.local.logs import type_of

    event = entry.event or {}
    return (
        f"{str(event.get('time', '?'))[:19]}Z",
        type_of(entry),
        str(event.get("event")),
        entry.node,
        " ".join(describe_event(event).split()),
    )


def _emit(documents: Iterable[Mapping[str, Any]], *, output: str, stream: bool) -> None:
    """Print events for programs: as a list, or with `stream` one after another."""
    if stream:
        for each in documents:
            console.emit(each, output=output)
    else:
        items = list(documents)
        console.emit({"apiVersion": "v1", "kind": "List", "items": items}, output=output)


def _key(event: Mapping[str, Any]) -> tuple[str, str]:
    """Identity of an event; a repeated event is the same object with another version."""
    metadata = event["metadata"]
    return str(metadata.get("uid")), str(metadata.get("resourceVersion"))


def _last_seen(event: Mapping[str, Any]) -> str:
    """Time of the event as RFC 3339 text, which sorts chronologically."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
    )
    return next(
        (str(each) for each in times if each), str(event["metadata"].get("creationTimestamp") or "")
    )


def _row(event: Mapping[str, Any]) -> tuple[str, ...]:
    from datetime import datetime

    from kdist.units import age

    about = event.get("involvedObject") or {}
    series = event.get("series") or {}
    count = series.get("count") or event.get("count") or 1
    try:
        seen = age(time.time() - datetime.fromisoformat(_last_seen(event)).timestamp())
    except ValueError:
        seen = "?"
    times = f" (x{count})" if isinstance(count, int) and count > 1 else ""
    cells = (
        seen,
        str(event.get("type") or "-"),
        str(event.get("reason") or "-"),
        f"{str(about.get('kind') or '').lower()}/{about.get('name') or ''}",
        f"{event.get('message') or ''}{times}",
    )
    return tuple(" ".join(each.split()) for each in cells)  # one line, whatever is in it

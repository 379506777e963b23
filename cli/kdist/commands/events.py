"""`kdist events`: the Kubernetes events of a job, or the trainer events of a local run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code

if TYPE_CHECKING:
    from kdist.events import Entry
    from kdist.local.job import LocalJob

_POLL_SECONDS = 2.0


@click.command()
@options.job_argument
@click.option("-w", "--watch", is_flag=True, help="Keep watching, and show each new event.")
@click.option(
    "--types", default="", metavar="TYPE,…", help="Only events of these types, e.g. Warning."
)
@options.output_option("table", "json", "yaml", "jsonpath")
@click.option("--local", is_flag=True, help="The `kdist run` on this machine of that name.")
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
    r"""Show the Kubernetes events of a job.

    The events of its workload, its pods (also deleted ones), its volume claims and its Kueue
    Workload, oldest first. Of a run on this machine, what its agents and ranks report.

    \b
    Examples:
      kdist events digits
      kdist events digits -w
      kdist events -f job.yaml --types=Warning
    """
    from kdist import jobs

    wanted = {each.strip().lower() for each in types.split(",") if each.strip()}
    run = targets.find_local(job, file, local=local, **cluster_options)
    if run is not None:
        return _show_run(run, wanted, output=output, watch=watch)
    found = targets.find_job(job, file)
    cluster = targets.connect(**cluster_options, timeout=timeout, job=found.namespace)
    shown: set[tuple[str, str]] = set()
    first = True
    while True:
        events = [
            each
            for each in jobs.fetch_snapshot(cluster, found.name).events
            if not wanted or str(each.get("type") or "").lower() in wanted
        ]
        fresh = sorted((each for each in events if _key(each) not in shown), key=_last_seen)
        _show(fresh, output=output, first=first, stream=watch)
        shown.update(_key(each) for each in fresh)
        if not watch:
            if not fresh and output == "table":
                console.message(
                    f"there are no events for {found.name}; a cluster keeps them for an hour"
                )
            return Code.OK
        first = False
        time.sleep(_POLL_SECONDS)


def _show_run(run: LocalJob, types: set[str], *, output: str, watch: bool) -> int:
    """Show the events of a run on this machine; with `watch` until its `kdist run` ends."""
    from kdist.local import event_log

    found = event_log.read_events(run, follow=watch, types=types)
    if output == "table":
        shown = _show_run_events(found, stream=watch)
        if not shown and not watch:
            console.message(f"there are no such events in the logs of {run.name}")
    elif watch:
        for entry in found:
            console.emit(event_log.to_document(entry), output=output)
    else:
        items = [event_log.to_document(entry) for entry in found]
        console.emit({"apiVersion": "v1", "kind": "List", "items": items}, output=output)
    return Code.OK


def _show_run_events(entries: Iterable[Entry], *, stream: bool) -> bool:
    """Show entries as rows, each at once with `stream`; whether there were any."""
    from kdist.events import describe_event
    from kdist.local.event_log import type_of

    header = ("TIME", "TYPE", "REASON", "OBJECT", "MESSAGE")
    rows = (
        (
            f"{str((entry.event or {}).get('time', '?'))[:19]}Z",
            type_of(entry),
            str((entry.event or {}).get("event")),
            entry.node,
            " ".join(describe_event(entry.event or {}).split()),
        )
        for entry in entries
    )
    shown = False
    if not stream:
        collected = list(rows)
        if collected:
            console.table(collected, header=header)
        return bool(collected)
    for row in rows:
        for line in (row,) if shown else (header, row):
            _show_streamed(line, (20, 7, 21, 8, 0))
        shown = True
    return shown


def _show_streamed(row: tuple[str, ...], widths: tuple[int, ...]) -> None:
    """Show a row in fixed widths, because later rows are not known yet."""
    cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    console.result("   ".join(cells).rstrip())


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


def _show(events: list[Mapping[str, Any]], *, output: str, first: bool, stream: bool) -> None:
    if output != "table":
        if stream:
            for each in events:
                console.emit(each, output=output)
        else:
            console.emit({"apiVersion": "v1", "kind": "List", "items": events}, output=output)
        return
    rows = [_row(each) for each in events]
    header = ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")
    if stream:
        for row in [header, *rows] if first else rows:
            _show_streamed(row, (9, 7, 16, 28, 0))
    elif rows:
        console.table(rows, header=header)


def _row(event: Mapping[str, Any]) -> tuple[str, ...]:
    from datetime import UTC, datetime

    from kdist.units import age

    about = event.get("involvedObject") or {}
    series = event.get("series") or {}
    count = series.get("count") or event.get("count") or 1
    try:
        seen = age(
            max(
                0.0, (datetime.now(UTC) - datetime.fromisoformat(_last_seen(event))).total_seconds()
            )
        )
    except ValueError:
        seen = "?"
    message = " ".join(str(event.get("message") or "").split())
    times = f" (x{count})" if isinstance(count, int) and count > 1 else ""
    return (
        seen,
        str(event.get("type") or "-"),
        str(event.get("reason") or "-"),
        f"{str(about.get('kind') or '').lower()}/{about.get('name') or ''}",
        f"{message}{times}",
    )

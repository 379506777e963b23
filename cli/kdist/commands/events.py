"""`kdist events`: the Kubernetes events of a job, or the trainer events of a local run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code
from kdist.terminal import columns

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
def command(*, watch: bool, types: str, output: str, **which: Any) -> int:
    r"""Show the events of a job.

    The events of its workload, its pods (also deleted ones), its volume claims and its Kueue
    Workload, oldest first. Of a run on this machine, what its agents and ranks report.

    \b
    Examples:
      kdist events digits
      kdist events digits -w
      kdist events -f job.yaml --types=Warning
    """
    wanted = {each.strip().lower() for each in types.split(",") if each.strip()}
    found = targets.find(stays=watch, **which)
    table: columns.Table | None = None
    for events in found.events(wanted, follow=watch):
        if output != "table":
            _emit(events, output=output, stream=watch)
        elif events:
            header, widths = (
                (_RUN_HEADER, _RUN_WIDTHS) if "event" in events[0] else (_HEADER, _WIDTHS)
            )
            table = table or columns.Table(header, min_widths=widths if watch else ())
            console.add_rows(table, [_row(each) for each in events])
        elif not watch:
            console.message(found.no_events)
    return Code.OK


def _emit(documents: Sequence[Mapping[str, Any]], *, output: str, stream: bool) -> None:
    """Print events for programs: as a list, or with `stream` one after another."""
    if stream:
        for each in documents:
            console.emit(each, output=output, stream=True)
    else:
        items = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        console.emit(items, output=output)


def _row(event: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table: an event of Kubernetes with its age, one of the trainer with its time."""
    from datetime import datetime

    from kdist.status.documents import last_seen
    from kdist.units import age

    about = event.get("involvedObject") or {}
    series = event.get("series") or {}
    count = series.get("count") or event.get("count") or 1
    at = last_seen(event)
    if "event" in event:
        kind, seen = "", f"{(at or '?')[:19]}Z"
    else:
        kind = f"{str(about.get('kind') or '').lower()}/"
        try:
            seen = age(time.time() - datetime.fromisoformat(at).timestamp())
        except ValueError:
            seen = "?"
    times = f" (x{count})" if isinstance(count, int) and count > 1 else ""
    cells = (
        seen,
        str(event.get("type") or "-"),
        str(event.get("reason") or "-"),
        f"{kind}{about.get('name') or ''}",
        f"{event.get('message') or ''}{times}",
    )
    return tuple(" ".join(each.split()) for each in cells)  # one line, whatever is in it

"""`kdist status`: what a job is doing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands.options import cluster_options, connect, find_job, job_argument, output_option
from kdist.errors import Code

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.status import JobStatus, Snapshot

_EVERY = 1.0  # seconds between two looks


@click.command()
@job_argument
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Show it live until the job ends; Ctrl-C leaves the job alone.",
)
@output_option("table", "json", "yaml", "name")
@cluster_options
def command(
    job: str | None,
    file: str | None,
    *,
    watch: bool,
    output: str,
    timeout: float | None,
    **place: Any,
) -> int:
    r"""Show what a job is doing: phase, ranks, step, loss, checkpoint.

    The numbers are the agents' own, asked through the API server; where that is cut off, over a
    forwarded port. With -w an API server that goes away is waited for, --timeout long at most.

    \b
    Examples:
      kdist status digits
      kdist status -f job.yaml -w
      kdist status digits -o json | jq .phase

    \b
    Exit codes:
      0 the status was shown; with -w the job is done   4 there is no such job   5 the API server
      stays away 10, 11 with -w: the job failed, or was stopped   130 interrupted: the job goes on
    """
    from kdist import jobs

    found = find_job(job, file)
    cluster = connect(**place, timeout=timeout, job=found.namespace, stays=watch)
    if watch:
        return _watch(cluster, found.name, output)
    seen = jobs.fetch_snapshot(cluster, found.name)
    jobs.finalize(cluster, seen)
    _print(seen.status, output)
    if seen.gap:
        console.warning(seen.gap)
    return Code.OK


def _print(status: JobStatus, output: str) -> None:
    from kdist.views import status_table

    if output != "table":
        console.emit(status.to_document(), output=output, name=f"job/{status.name}")
        return
    console.table(status_table.status_rows(status), header=("JOB", status.name))
    ranks = status_table.rank_rows(status)
    if ranks:
        console.result("")
        console.table(ranks, header=status_table.RANK_HEADER)


def _watch(cluster: Cluster, name: str, output: str) -> int:
    """Look until the job ends: drawn on a terminal, else a line (or a document) whenever something
    has changed.
    """
    from kdist import jobs

    kept: dict[str, Any] = {
        "agents": jobs.Agents(cluster, namespace=cluster.namespace),
        "events": jobs.Events(cluster, cluster.namespace),
    }
    last = ""
    if output == "table" and console.can_draw():
        return _draw(cluster, name, **kept)
    while True:
        seen = jobs.fetch_snapshot(cluster, name, **kept)
        jobs.finalize(cluster, seen)
        line = jobs.describe_status(seen.status) + (f" ({seen.gap})" if seen.gap else "")
        if output != "table":
            console.emit(seen.status.to_document(), output=output, name=f"job/{name}")
        elif line != last:
            console.result(line)
        last = line
        if seen.status.phase.terminal:
            return jobs.exit_code(seen.status)
        time.sleep(_EVERY)


def _draw(cluster: Cluster, name: str, **kept: Any) -> int:
    from kdist import jobs
    from kdist.views.live_job import View

    view = View()
    with console.drawing() as drawing:
        while True:
            seen: Snapshot = jobs.fetch_snapshot(cluster, name, **kept)
            jobs.finalize(cluster, seen)
            drawing.update(view.draw(seen), refresh=True)
            if seen.status.phase.terminal:
                break
            time.sleep(_EVERY)
    _print(seen.status, "table")
    return jobs.exit_code(seen.status)

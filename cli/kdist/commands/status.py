"""`kdist status`: what a job is doing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands.options import cluster_options, job_argument, local_option, output_option
from kdist.commands.targets import connect, find_job, find_local
from kdist.errors import Code

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kdist.cluster import Cluster
    from kdist.diagnose import Diagnosis
    from kdist.job.local.job import LocalJob
    from kdist.status import JobStatus

    Moment = tuple[JobStatus, Diagnosis, str]  # with what is missing from the status

_POLL_SECONDS = 0.5


@click.command()
@job_argument
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="Show it live until the job ends; Ctrl-C ends the view, not the job.",
)
@output_option("table", "json", "yaml", "name")
@local_option
@cluster_options
def command(
    job: str | None,
    file: str | None,
    *,
    watch: bool,
    output: str,
    local: bool,
    timeout: float | None,
    **cluster_options: Any,
) -> int:
    r"""Show what a job is doing: phase, ranks, step, loss, checkpoint.

    The numbers come from the agents, through the API server's proxy or, where that is blocked, a
    forwarded port. A run on this machine is found by its name, too. With -w, it retries while the
    API server is unreachable, for at most --timeout.

    \b
    Examples:
      kdist status digits
      kdist status -f job.yaml -w
      kdist status digits -o json | jq .phase

    \b
    Exit codes:
      0 the status was shown; with -w the job is done   4 there is no such job   5 the API server
      is unreachable   10, 11 with -w: the job failed, or was stopped   130 interrupted
    """
    run = find_local(job, file, local=local, **cluster_options)
    if run is not None:
        return _show_run(run, output, watch=watch)
    found = find_job(job, file)
    cluster = connect(**cluster_options, timeout=timeout, job=found.namespace, stays=watch)
    if watch:
        return _watch(_watch_job(cluster, found.name), output)
    from kdist.job import cluster as jobs

    snapshot = jobs.fetch_snapshot(cluster, found.name)
    jobs.finalize(cluster, snapshot)
    _print(snapshot.status, output)
    if snapshot.gap:
        console.warning(snapshot.gap)
    return Code.OK


def _show_run(run: LocalJob, output: str, *, watch: bool) -> int:
    from kdist.job.local.status import read_status

    if watch:
        return _watch(_watch_run(run), output)
    _print(read_status(run), output)
    return Code.OK


def _print(status: JobStatus, output: str) -> None:
    from kdist.views import status_table

    if output != "table":
        console.emit(status.to_document(), output=output, name=f"job/{status.name}")
        return
    rows = status_table.status_rows(status)
    if status.location == "local":
        rows = [row for row in rows if row[0] != "namespace"]
    console.table(rows, header=("JOB", status.name))
    ranks = status_table.rank_rows(status)
    if ranks:
        console.result("")
        console.table(ranks, header=status_table.RANK_HEADER)


def _watch_job(cluster: Cluster, name: str) -> Iterator[Moment]:
    """Yield the state of a job on a cluster until it has ended."""
    from kdist.diagnose import diagnose
    from kdist.job import cluster as jobs

    for snapshot in jobs.watch_job(cluster, name):
        yield snapshot.status, diagnose(snapshot), snapshot.gap


def _watch_run(run: LocalJob) -> Iterator[Moment]:
    """Yield the state of a run on this machine until its `kdist run` has ended."""
    from kdist.job.local.status import diagnose_run

    while True:
        active = run.active
        yield (*diagnose_run(run), "")
        if not active:
            return
        time.sleep(_POLL_SECONDS)


def _watch(moments: Iterable[Moment], output: str) -> int:
    """Watch the job until it ends: as a live view on a terminal, otherwise as a line for each
    change, or a document for each moment.
    """
    from kdist.job import cluster as jobs

    if output == "table" and console.can_draw():
        return _watch_live(moments)
    last_line = ""
    for status, _, gap in moments:
        line = jobs.describe_status(status) + (f" ({gap})" if gap else "")
        if output != "table":
            console.emit(status.to_document(), output=output, name=f"job/{status.name}")
        elif line != last_line:
            console.result(line)
        last_line = line
    return jobs.exit_code(status)


def _watch_live(moments: Iterable[Moment]) -> int:
    from kdist.job import cluster as jobs
    from kdist.status.job_status import StepHistory
    from kdist.views import live

    history = StepHistory()
    with console.drawing() as drawing:
        for status, cause, gap in moments:
            now = time.time()
            history.record(now, status.step, status.loss)
            view = live.from_status(status, cause, history, now=now, gap=gap)
            drawing.update(live.render(view))
    _print(status, "table")
    return jobs.exit_code(status)

"""`kdist status`: what a job is doing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import targets
from kdist.commands.options import cluster_options, job_argument, local_option, output_option
from kdist.errors import Code

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kdist.diagnose import Diagnosis
    from kdist.status import JobStatus, Snapshot

    Moment = tuple[Snapshot, Diagnosis]


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
def command(*, watch: bool, output: str, **which: Any) -> int:
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
    found = targets.find(stays=watch, **which)
    if watch:
        return _watch(found.watch(), output)
    seen = found.snapshot()
    if seen.gap:
        console.warning(seen.gap)
    _print(seen.status, output)
    return Code.OK


def _print(status: JobStatus, output: str) -> None:
    from kdist.views import status_table

    if output != "table":
        console.emit(status.to_document(), output=output, name=f"job/{status.name}")
        return
    hidden = "namespace" if status.location == "local" else ""
    rows = [row for row in status_table.status_rows(status) if row[0] != hidden]
    console.table(rows, header=("JOB", status.name))
    ranks = status_table.rank_rows(status)
    if ranks:
        console.result("")
        console.table(ranks, header=status_table.RANK_HEADER)


def _watch(moments: Iterable[Moment], output: str) -> int:
    """Watch the job until it ends: as a live view on a terminal, otherwise as a line for each
    change, or a document for each moment.
    """
    from kdist.job.goals import describe_status, exit_code

    if output == "table" and console.can_draw():
        from kdist.job.goals import exit_code
        from kdist.status.step_history import StepHistory
        from kdist.views import live
        from kdist.views.frame import Frame

        history = StepHistory()
        with console.drawing() as drawing:
            for seen, cause in moments:
                now, status = time.time(), seen.status
                history.record(now, status.step, status.loss)
                view = live.from_status(status, cause, history, now=now, gap=seen.gap)
                drawing.update(Frame(view))
        _print(status, "table")
        return exit_code(status)
    last_line = ""
    for seen, _ in moments:
        status = seen.status
        line = describe_status(status) + (f" ({seen.gap})" if seen.gap else "")
        if output != "table":
            name = f"job/{status.name}"
            console.emit(status.to_document(), output=output, name=name, stream=True)
        elif line != last_line:
            console.result(line)
        last_line = line
    return exit_code(status)

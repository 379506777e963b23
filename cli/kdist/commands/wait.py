"""`kdist wait`: wait until a job reaches a condition."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, NotFoundError
from kdist.job.cluster import GOALS, describe_status, wait_for


@click.command()
@options.job_argument
@click.option(
    "--for",
    "goal",
    type=click.Choice(tuple(GOALS)),
    default="done",
    show_default=True,
    help="Condition to wait for.",
)
@options.local_option
@options.cluster_options
def command(
    job: str | None,
    file: str | None,
    *,
    goal: str,
    local: bool,
    timeout: float | None,
    **cluster_options: Any,
) -> int:
    r"""Wait until a job is done, or reaches another condition.

    It also returns when the job ends in another way, which the exit code tells apart, and reports
    every change of the status on stderr. Without --timeout it waits without limit, even through
    outages of the API server.

    \b
    Examples:
      kdist wait digits
      kdist wait digits --for=first-step --timeout 10m
      kdist delete digits && kdist wait digits --for=deleted

    \b
    Exit codes:
      0 condition met   4 no such job   5 API server unreachable   6 timed out
      10 the job failed   11 the job was stopped
    """
    try:
        run = targets.find_local(job, file, local=local, **cluster_options)
    except NotFoundError:
        if goal != "deleted":
            raise
        console.result(f"{targets.find_job(job, file).name} is deleted")
        return Code.OK
    if run is not None:
        from kdist.job.local.status import wait_for as wait_for_local

        ended = wait_for_local(run, goal, timeout=timeout, notify=console.message)
        console.result(f"{run.name} is deleted" if ended is None else describe_status(ended))
        return Code.OK
    found = targets.find_job(job, file)
    cluster = targets.connect(**cluster_options, timeout=timeout, job=found.namespace, stays=True)
    status = wait_for(cluster, found.name, goal, timeout=timeout, notify=console.message)
    console.result(f"{found.name} is deleted" if status is None else describe_status(status))
    return Code.OK

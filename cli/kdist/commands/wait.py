"""`kdist wait`: wait until a job reaches a condition."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code
from kdist.jobs import GOALS, describe_status, wait_for


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
@click.option("--local", is_flag=True, help="The `kdist run` on this machine of that name.")
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

    It also returns when the job ends otherwise, with an exit code for each case, and reports every
    change on stderr. Without --timeout it waits without limit, also through outages of the API
    server.

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
    run = targets.find_local(job, file, local=local, **cluster_options)
    if run is not None:
        from kdist.local import conditions

        ended = conditions.wait_for(run, goal, timeout=timeout, notify=console.message)
        console.result(f"{run.name} is gone" if ended is None else describe_status(ended))
        return Code.OK
    found = targets.find_job(job, file)
    cluster = targets.connect(**cluster_options, timeout=timeout, job=found.namespace, stays=True)
    status = wait_for(cluster, found.name, goal, timeout=timeout, notify=console.message)
    console.result(f"{found.name} is gone" if status is None else describe_status(status))
    return Code.OK

"""`kdist wait`: until a job has come so far."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands.options import cluster_options, connect, find_job, job_argument
from kdist.errors import Code

_GOALS = ("done", "running", "first-step", "checkpoint", "suspended", "stopped", "deleted")


@click.command()
@job_argument
@click.option(
    "--for",
    "goal",
    type=click.Choice(_GOALS),
    default="done",
    show_default=True,
    help="What to wait for.",
)
@cluster_options
def command(
    job: str | None, file: str | None, *, goal: str, timeout: float | None, **place: Any
) -> int:
    r"""Wait until a job is done, or has come as far as asked.

    It ends on every end of the job, with an exit code of its own, and tells each change on stderr.
    Without --timeout it waits as long as it takes; an API server that is away for a while is waited
    for.

    \b
    Examples:
      kdist wait digits
      kdist wait digits --for=first-step --timeout 10m
      kdist delete digits && kdist wait digits --for=deleted

    \b
    Exit codes:
      0 it came so far   4 there is no such job   5 the API server stays away   6 timed out
      10 the job failed   11 the job was stopped
    """
    from kdist import jobs

    found = find_job(job, file)
    cluster = connect(**place, timeout=timeout, job=found.namespace, stays=True)
    status = jobs.wait_for(cluster, found.name, goal, timeout=timeout, tell=console.message)
    console.result(f"{found.name} is gone" if status is None else jobs.describe_status(status))
    return Code.OK

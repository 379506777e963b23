"""`kdist wait`: wait until a job reaches a condition."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code, NotFoundError
from kdist.job.find import refer
from kdist.job.goals import GOALS, describe_status


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
@options.output_option("table", "json")
@options.cluster_options
def command(
    job: str | None,
    file: str | None,
    *,
    goal: str,
    local: bool,
    output: str,
    timeout: float | None,
    **cluster_options: Any,
) -> int:
    r"""Wait until a job is done, or reaches another condition.

    It also returns when the job ends in another way, which the exit code tells apart, and reports
    every change of the status on stderr. Without --timeout it waits without limit, even through
    outages of the API server. A job that has succeeded has passed done, running, first-step and
    checkpoint, also if it never reported a step or had no checkpoint.

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
    named = refer(job, file)
    try:
        found = targets.find(named, local=local, timeout=timeout, stays=True, **cluster_options)
    except NotFoundError:
        if goal != "deleted":
            raise
        ended = None
    else:
        ended = found.wait(goal, timeout=timeout)
    if output == "table":
        said = f"{named.name} is deleted" if ended is None else describe_status(ended)
        console.result(said)
    elif ended is None:
        gone = {"jobs": [named.name], "deleted": [], "kept": [], "dryRun": "none"}
        console.emit(gone, kind="Deletion", output=output)
    else:
        console.emit(ended.to_document(), output=output)
    return Code.OK

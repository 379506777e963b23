"""`kdist stop`: let a job save and end."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options


@click.command()
@options.job_argument
@options.cluster_options
@options.wait_option
@options.dry_run_option
def command(
    job: str | None,
    file: str | None,
    *,
    wait: bool,
    dry_run: str,
    timeout: float | None,
    **place: Any,
) -> None:
    r"""Let a job save its state and end.

    Every pod is told to end, saves the step it is at, and goes. The job counts as over (phase
    Stopped) and its objects stay; `kdist resume` goes on from that step all the same, `kdist
    delete` removes it.

    \b
    Examples:
      kdist stop digits
      kdist stop digits -n ml --no-wait
      kdist stop digits && kdist delete digits

    \b
    Exit codes:
      0 stopped   1 it is over, or could not save   4 no such job   6 its pods did not end in time
      (--timeout)
    """
    from kdist.jobs import suspend

    target = options.find_target(job, file, **place)
    if dry_run == "client":
        console.result(f"{target.name} would be stopped (client dry run)")
        return
    told = suspend.suspend(
        target,
        "stopped",
        wait=wait,
        timeout=timeout,
        tell=console.message,
        dry_run=dry_run == "server",
    )
    console.result(told)

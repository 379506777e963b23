"""`kdist suspend`: let a job save and give its machines back."""

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
    r"""Let a job save its state and give its machines back.

    Every pod is told to end, saves the step it is at, and goes; `kdist resume` goes on from that
    step.

    \b
    Examples:
      kdist suspend digits
      kdist suspend digits -n ml --no-wait
      kdist suspend digits --dry-run=server

    \b
    Exit codes:
      0 suspended   1 it is over, or could not save   4 no such job   6 its pods did not end in time
      (--timeout)
    """
    from kdist.jobs import suspend

    target = options.find_target(job, file, **place)
    if dry_run == "client":
        console.result(f"{target.name} would be suspended (client dry run)")
        return
    told = suspend.suspend(
        target,
        "suspended",
        wait=wait,
        timeout=timeout,
        tell=console.message,
        dry_run=dry_run == "server",
    )
    console.result(told)

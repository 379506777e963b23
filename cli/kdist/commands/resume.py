"""`kdist resume`: let a suspended or stopped job go on."""

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
    r"""Let a suspended or stopped job go on from the step it saved.

    \b
    Examples:
      kdist resume digits
      kdist resume -f job.yaml
      kdist resume digits -n ml --timeout 5m

    \b
    Exit codes:
      0 it trains again   1 it is over   4 no such job   6 it does not train in time (--timeout)
    """
    from kdist.jobs import suspend

    target = options.find_target(job, file, **place)
    if dry_run == "client":
        console.result(f"{target.name} would be resumed (client dry run)")
        return
    console.result(
        suspend.resume(
            target, wait=wait, timeout=timeout, tell=console.message, dry_run=dry_run == "server"
        )
    )

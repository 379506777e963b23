"""`kdist resume`: resume a suspended job."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options, targets


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
    **cluster_options: Any,
) -> None:
    r"""Resume a suspended job from the step it saved.

    \b
    Examples:
      kdist resume digits
      kdist resume -f job.yaml
      kdist resume digits -n ml --timeout 5m

    \b
    Exit codes:
      0 the job trains again   1 the job has finished   4 no such job
      6 the job does not train within --timeout
    """
    from kdist.jobs import suspend

    target = targets.find_target(job, file, **cluster_options)
    if dry_run == "client":
        console.result(f"{target.name} would be resumed (client dry run)")
        return
    console.result(
        suspend.resume(
            target, wait=wait, timeout=timeout, notify=console.message, dry_run=dry_run == "server"
        )
    )

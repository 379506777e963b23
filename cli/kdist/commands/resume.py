"""`kdist resume`: resume a suspended job."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options, targets


@click.command()
@options.job_argument
@options.local_option
@options.cluster_options
@options.wait_option
@options.dry_run_option
def command(
    job: str | None,
    file: str | None,
    *,
    local: bool,
    wait: bool,
    dry_run: str,
    timeout: float | None,
    **cluster_options: Any,
) -> None:
    r"""Resume a suspended job from the step it saved.

    A run on this machine starts again in the background, with the command that started it.

    \b
    Examples:
      kdist resume digits
      kdist resume -f job.yaml
      kdist resume digits -n ml --timeout 5m

    \b
    Exit codes:
      0 the job trains again   1 the job has finished   4 no such job
      6 the job does not train again within --timeout
    """
    from kdist.job.cluster import suspend

    run = targets.find_local(job, file, local=local, changes=True, **cluster_options)
    if run is not None:
        from kdist.job.local import suspension

        console.result(suspension.resume(run, notify=console.message, dry_run=dry_run))
        return
    target = targets.find_target(job, file, **cluster_options)
    if dry_run == "client":
        console.result(f"{target.name} would be resumed (client dry run)")
        return
    console.result(
        suspend.resume(
            target, wait=wait, timeout=timeout, notify=console.message, dry_run=dry_run == "server"
        )
    )

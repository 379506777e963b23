"""`kdist suspend`: save a job's state and stop it."""

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
    r"""Save a job's state and stop it; `resume` continues it.

    Every pod receives SIGTERM, saves the current step, and ends, which frees its resources;
    `kdist resume` continues from that step. The job's objects and checkpoints stay. A run on this
    machine saves and ends likewise, and the same `kdist run` continues it.

    \b
    Examples:
      kdist suspend digits
      kdist suspend digits -n ml --no-wait
      kdist suspend digits --dry-run=server

    \b
    Exit codes:
      0 suspended   1 the job has finished, or could not save   4 no such job
      6 its pods did not end within --timeout
    """
    from kdist.job.cluster import suspend

    run = targets.find_local(job, file, local=local, changes=True, **cluster_options)
    if run is not None:
        from kdist.job.local import suspension

        summary = suspension.suspend(
            run, wait=wait, timeout=timeout, notify=console.message, dry_run=dry_run
        )
        console.result(summary)
        return
    target = targets.find_target(job, file, **cluster_options)
    if dry_run == "client":
        console.result(f"{target.name} would be suspended (client dry run)")
        return
    summary = suspend.suspend(
        target,
        wait=wait,
        timeout=timeout,
        notify=console.message,
        dry_run=dry_run == "server",
    )
    console.result(summary)

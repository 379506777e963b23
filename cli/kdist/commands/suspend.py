"""`kdist suspend`: save a job's state and stop it."""

from __future__ import annotations

from typing import Any

import click

from kdist.commands import options, targets


@click.command()
@options.job_argument
@options.local_option
@options.cluster_options
@options.wait_option
@options.dry_run_option
@options.output_option("table", "json")
def command(**arguments: Any) -> None:
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
    targets.change("suspend", lambda job, how: job.suspend(how), **arguments)

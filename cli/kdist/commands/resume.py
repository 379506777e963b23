"""`kdist resume`: resume a suspended job."""

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
    targets.change("resume", lambda job, how: job.resume(how), **arguments)

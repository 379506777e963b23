"""`kdist resume`: resume a suspended job."""

from __future__ import annotations

from typing import Any

import click

from kdist.commands import options, targets
from kdist.job.job import Change


@click.command()
@options.job_argument
@options.local_option
@options.cluster_options
@options.wait_option
@options.dry_run_option
@options.output_option("table", "json")
def command(
    job: str | None,
    file: str | None,
    *,
    local: bool,
    wait: bool,
    dry_run: str,
    output: str,
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
    found = targets.find(job, file, local=local, changes=True, **cluster_options)
    said = found.resume(Change(wait, timeout, dry_run))
    targets.tell_change(found, "resume", said, output=output, dry_run=dry_run)

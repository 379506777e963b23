"""`kdist restart`: restart all ranks of a job."""

from __future__ import annotations

from typing import Any

import click

from kdist.commands import options, targets


@click.command()
@options.job_argument
@click.option("--fresh", is_flag=True, help="Archive the previous run and start from scratch.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation of --fresh.")
@options.accept_option
@options.cluster_options
@options.wait_option
@options.preview_option
@options.output_option("table", "json")
def command(*, fresh: bool, yes: bool, **arguments: Any) -> None:
    r"""Restart all ranks of a job from its last checkpoint.

    A running job saves first. A job that has failed, or that was removed after
    ttlSecondsAfterFinished, is created again and resumes from its last checkpoint. With --fresh the
    checkpoints are archived, not deleted.

    \b
    Examples:
      kdist restart digits
      kdist restart digits --no-wait
      kdist restart digits --fresh --yes

    \b
    Exit codes:
      0 the job trains again   4 no such job   6 pods did not end or start within --timeout
      11 not confirmed
    """
    targets.change(
        "restart", lambda job, how: job.restart(how, fresh=fresh, confirmed=yes), **arguments
    )

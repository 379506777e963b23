"""`kdist restart`: all ranks of a job anew."""

from __future__ import annotations

import sys
from typing import Any

import click

from kdist import console
from kdist.commands import options
from kdist.errors import UsageError


@click.command()
@options.job_argument
@click.option(
    "--fresh", is_flag=True, help="Put the checkpoints aside and begin at step 0, as a new run."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before --fresh.")
@options.cluster_options
@options.wait_option
@click.option(
    "--dry-run",
    type=click.Choice(["none", "client"]),
    default="none",
    help="Only say what would be done.",
)
def command(
    job: str | None,
    file: str | None,
    *,
    fresh: bool,
    yes: bool,
    wait: bool,
    dry_run: str,
    timeout: float | None,
    **place: Any,
) -> None:
    r"""Start all ranks of a job anew, from its last checkpoint.

    A running job saves first. A job that has failed is made anew and goes on from its last
    checkpoint; so does one that was removed after its time. With --fresh the checkpoints are put
    aside, not removed.

    \b
    Examples:
      kdist restart digits
      kdist restart digits --no-wait
      kdist restart digits --fresh --yes

    \b
    Exit codes:
      0 it trains again   4 no such job   6 pods did not go or come in time (--timeout)   11 not
      confirmed
    """
    from kdist.jobs import restart

    target = options.find_target(job, file, **place)
    if dry_run == "client":
        how = "with its checkpoints put aside" if fresh else "from its last checkpoint"
        console.result(f"{target.name} would be restarted {how} (client dry run)")
        return
    if fresh and not yes:
        _confirm(target.name, target.namespace)
    console.result(
        restart.restart(target, fresh=fresh, wait=wait, timeout=timeout, tell=console.message)
    )


def _confirm(name: str, namespace: str) -> None:
    """Ask, where there is somebody to ask. Raises `UsageError` where there is not, `click.Abort`
    for a no.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"--fresh begins {name} at step 0", hint="add --yes to say that this is meant"
        )
    click.confirm(
        f"Begin {name} in namespace {namespace} at step 0? Its checkpoints are put aside.",
        abort=True,
        err=True,
    )

"""`kdist restart`: restart all ranks of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.commands.confirmation import confirm

if TYPE_CHECKING:
    from kdist.job.local.job import LocalJob


@click.command()
@options.job_argument
@click.option("--fresh", is_flag=True, help="Archive the previous run and start from scratch.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation of --fresh.")
@options.accept_option
@options.cluster_options
@options.wait_option
@click.option(
    "--dry-run",
    type=click.Choice(["none", "client"]),
    default="none",
    help="Show what would be done, without doing it.",
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
    **cluster_options: Any,
) -> None:
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
    from kdist.job.cluster import restart

    target = targets.find_cluster_job(
        job,
        file,
        instead=lambda run: _instead(run, fresh=fresh),
        changes=True,
        **cluster_options,
    )
    if dry_run == "client":
        how = "from scratch, with its checkpoints archived" if fresh else "from its last checkpoint"
        console.result(f"{target.name} would be restarted {how} (client dry run)")
        return
    if fresh and not yes:
        confirm(
            f"--fresh restarts {target.name} at step 0",
            f"Restart {target.name} in namespace {target.namespace} at step 0? Its checkpoints are "
            "archived.",
        )
    console.result(
        restart.restart(target, fresh=fresh, wait=wait, timeout=timeout, notify=console.message)
    )


def _instead(run: LocalJob, *, fresh: bool) -> targets.Instead:
    """What restarts a run on this machine."""
    if run.active:
        again = run.next_run_with(fresh=True) if fresh else run.kdist("resume")
        return targets.Instead(f"suspend it, then type `{again}`", run.kdist("suspend"))
    if fresh or run.is_done:
        reason = "it is done; " if run.is_done else ""
        what = f"{reason}--fresh archives it and starts at step 0"
        return targets.Instead(what, run.next_run_with(fresh=True))
    return targets.Instead("it continues from its last checkpoint", run.next_run)

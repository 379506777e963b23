"""`kdist scale`: change the number of nodes of a job while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets

if TYPE_CHECKING:
    from kdist.job.local.job import LocalJob


@click.command()
@options.job_argument
@click.option(
    "--nodes",
    required=True,
    metavar="N|MIN:MAX",
    help="Number of nodes; a single number keeps the job's min where possible.",
)
@options.cluster_options
@options.wait_option
@options.accept_option
@options.dry_run_option
def command(
    job: str | None,
    file: str | None,
    *,
    nodes: str,
    wait: bool,
    dry_run: str,
    timeout: float | None,
    **cluster_options: Any,
) -> None:
    r"""Change the number of nodes of a job while it runs.

    New nodes join together, at a step that all ranks have saved; nodes that leave save first. No
    step is lost. The job file is not changed: change the number there too, or the next `kdist
    apply` restores the old one.

    \b
    Examples:
      kdist scale digits --nodes 4
      kdist scale digits --nodes 1:4            (at least one, at most four)
      kdist scale digits --nodes 2 --no-wait

    \b
    Exit codes:
      0 scaled   2 wrong usage   4 no such job   6 nodes did not join or leave within --timeout
    """
    from kdist.job.cluster import scale

    target = targets.find_cluster_job(
        job,
        file,
        instead=lambda run: _instead(run, nodes),
        changes=True,
        **cluster_options,
    )
    least, most = scale.parse_nodes(nodes, target)
    if dry_run == "client":
        console.result(
            f"{target.name} would have {scale.describe_nodes(least, most)} (client dry run)"
        )
        return
    summary = scale.scale(
        target,
        least,
        most,
        wait=wait,
        timeout=timeout,
        notify=console.message,
        dry_run=dry_run == "server",
    )
    console.result(summary)


def _instead(run: LocalJob, nodes: str) -> targets.Instead:
    """What changes the number of nodes of a run on this machine."""
    again = run.next_run_with("--nodes", nodes, fresh=run.is_done)
    if run.active:
        return targets.Instead(f"suspend it, then type `{again}`", run.kdist("suspend"))
    if run.is_done:
        return targets.Instead("it is done; --fresh archives it and starts at step 0", again)
    return targets.Instead("it continues on as many nodes as `kdist run` is given", again)

"""`kdist scale`: change the number of nodes of a job while it runs."""

from __future__ import annotations

from typing import Any

import click

from kdist.commands import options, targets


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
@options.output_option("table", "json")
def command(*, nodes: str, **arguments: Any) -> None:
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
    targets.change("scale", lambda job, how: job.scale(nodes, how), **arguments)

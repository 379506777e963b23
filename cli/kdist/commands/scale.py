"""`kdist scale`: other bounds for the number of nodes, while the job runs."""

from __future__ import annotations

from typing import Any

import click

from kdist import console
from kdist.commands import options


@click.command()
@options.job_argument
@click.option(
    "--nodes",
    required=True,
    metavar="N|MIN:MAX",
    help="Nodes that the job may have; one number keeps its min if it can.",
)
@options.cluster_options
@options.wait_option
@options.dry_run_option
def command(
    job: str | None,
    file: str | None,
    *,
    nodes: str,
    wait: bool,
    dry_run: str,
    timeout: float | None,
    **place: Any,
) -> None:
    r"""Change the number of nodes of a job while it runs.

    Nodes that come are let in together, at a step that all have saved; nodes that go save first. No
    step is lost. The job file is not changed: write the number there too, or the next `kdist apply`
    goes back to the old one.

    \b
    Examples:
      kdist scale digits --nodes 4
      kdist scale digits --nodes 1:4            (at least one, at most four)
      kdist scale digits --nodes 2 --no-wait

    \b
    Exit codes:
      0 scaled   2 wrong usage   4 no such job   6 nodes did not come or go in time (--timeout)
    """
    from kdist.jobs import scale

    target = options.find_target(job, file, **place)
    least, most = scale.read_bounds(nodes, target)
    if dry_run == "client":
        console.result(f"{target.name} would have {scale.shown(least, most)} (client dry run)")
        return
    told = scale.scale(
        target,
        least,
        most,
        wait=wait,
        timeout=timeout,
        tell=console.message,
        dry_run=dry_run == "server",
    )
    console.result(told)

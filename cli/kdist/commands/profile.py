"""`kdist profile`: traces of the next steps of a job that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kdist import console
from kdist.commands import options

_PATIENCE = 300.0


def _ranks(_: click.Context, __: click.Parameter, value: str) -> str:
    if value == "all":
        return ""
    if not value or not all(each.isdigit() for each in value.split(",")):
        raise click.BadParameter(f"`{value}` is neither all nor numbers such as 0,3")
    return value


@click.command()
@options.job_argument
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="How many steps to record.",
)
@click.option(
    "--ranks",
    default="all",
    show_default=True,
    metavar="all|0,3",
    callback=_ranks,
    help="Which ranks record.",
)
@click.option(
    "--local",
    is_flag=True,
    help="The run of `kdist run` on this machine, even where -n or a cluster is set.",
)
@options.cluster_options
@click.option(
    "-o",
    "--output",
    default="",
    metavar="FOLDER",
    help="Where the traces go; ./NAME-profile unless said.",
)
def command(
    job: str | None,
    file: str | None,
    *,
    steps: int,
    ranks: str,
    local: bool,
    timeout: float | None,
    output: str,
    **place: Any,
) -> None:
    r"""Record the next steps of a running job, and show their time.

    All ranks record the same steps with torch's profiler, which makes these steps slower and no
    others. Each trace is a Chrome trace (JSON, compressed) that https://ui.perfetto.dev opens as it
    is. COLLECTIVES is the share of the time in which a collective was under way, beside computation
    or not.

    \b
    Examples:
      kdist profile digits
      kdist profile digits --steps 20 --ranks 0,3 -n ml -o traces
      kdist profile -f job.yaml --local

    \b
    Exit codes:
      0 recorded   1 it could not be asked   4 no such job or rank   6 it did not come to record
      (--timeout)
    """
    from kdist.jobs import profile

    root = options.find_run(job, file, local=local, at_work=True, **place)
    if root is not None:
        from kdist.local import trainer_tools as here

        name, asks = root.name, here.local_agents(root)
    else:
        target = options.find_target(job, file, **place)
        name, asks = target.name, profile.cluster_agents(target)
    folder = Path(output or f"{name}-profile")
    patience = _PATIENCE if timeout is None else timeout
    summaries = profile.record(
        asks, folder, steps=steps, ranks=ranks, timeout=patience, tell=console.message
    )
    console.table(profile.rank_rows(summaries), header=("RANK", "STEPS", "A STEP", "COLLECTIVES"))
    console.result("")
    console.table(
        profile.operation_rows(summaries), header=("OPERATION", "CALLS", "CPU", "DEVICE", "OF ALL")
    )
    console.message(
        f"{len(summaries)} trace{'s'[: len(summaries) - 1]} in {folder}; "
        "https://ui.perfetto.dev opens them"
    )

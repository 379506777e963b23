"""`kdist profile`: traces of the next steps of a running job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kdist import console
from kdist.commands import options, targets

_TIMEOUT = 300.0  # seconds


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
    help="Number of steps to record.",
)
@click.option(
    "--ranks",
    default="all",
    show_default=True,
    metavar="all|0,3",
    callback=_ranks,
    help="Which ranks record.",
)
@options.local_option
@options.cluster_options
@options.out_option("Folder for the traces (default: ./NAME-profile).", folder=True)
@options.output_option("table", "json")
def command(
    *,
    steps: int,
    ranks: str,
    timeout: float | None,
    out: Path | None,
    output: str,
    **which: Any,
) -> None:
    r"""Record the next steps of a running job with torch's profiler.

    All ranks record the same steps, and only these are slowed down. Each
    trace is a compressed Chrome trace (JSON) that https://ui.perfetto.dev opens directly.
    COLLECTIVES is the share of the time in which a collective was in flight, whether or not it
    overlapped with computation.

    \b
    Examples:
      kdist profile digits
      kdist profile digits --steps 20 --ranks 0,3 -n ml --out traces
      kdist profile -f job.yaml --local

    \b
    Exit codes:
      0 recorded   1 no agent could be reached   4 no such job or rank
      6 not recorded within --timeout
    """
    from kdist.profile import recording

    found = targets.find(active=True, **which)
    agents = recording.agents_of(found)
    folder = out or Path(f"{found.name}-profile")
    summaries = recording.record(
        agents,
        folder,
        steps=steps,
        ranks=ranks,
        timeout=_TIMEOUT if timeout is None else timeout,
        notify=console.message,
    )
    if output == "json":
        document = {"job": found.name, "folder": str(folder), "ranks": summaries}
        console.emit(document, kind="Profile", output=output)
    else:
        _show(summaries)
    console.message(
        f"{len(summaries)} trace{'' if len(summaries) == 1 else 's'} in {folder}; "
        "open them with https://ui.perfetto.dev"
    )


def _show(summaries: Sequence[Mapping[str, Any]]) -> None:
    from kdist.profile import recording

    console.table(recording.rank_rows(summaries), header=("RANK", "STEPS", "A STEP", "COLLECTIVES"))
    console.result("")
    console.table(
        recording.operation_rows(summaries),
        header=("OPERATION", "CALLS", "CPU", "DEVICE", "OF ALL"),
    )

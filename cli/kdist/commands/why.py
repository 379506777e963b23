"""`kdist why`: the one cause that matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands.options import cluster_options, connect, find_job, job_argument, output_option
from kdist.errors import Code

if TYPE_CHECKING:
    from kdist.diagnose import Diagnosis


@click.command()
@job_argument
@output_option("table", "json", "yaml", "name")
@cluster_options
def command(
    job: str | None, file: str | None, *, output: str, timeout: float | None, **place: Any
) -> int:
    r"""Say why a job does not do what it should, and what helps.

    One cause, ranked before its consequences, with what it was seen by, the way out and the command
    to type next. It reads events, pods, exit records, the queue and the agents, and changes
    nothing.

    \b
    Examples:
      kdist why digits
      kdist why -f job.yaml
      kdist why digits -o json | jq -r .cause
    """
    from kdist import jobs
    from kdist.diagnose import diagnose

    found = find_job(job, file)
    cluster = connect(**place, timeout=timeout, job=found.namespace)
    seen = jobs.fetch_snapshot(cluster, found.name, closely=True)
    cause = diagnose(seen)
    if seen.gap:
        console.warning(f"{seen.gap}: a rank that hangs or is slow may be among them")
    if output == "table":
        _print(cause)
        return Code.OK
    document = {
        "apiVersion": "cli.kdist.dev/v1",
        "kind": "Diagnosis",
        "job": found.name,
        "phase": str(seen.status.phase),
    }
    console.emit({**document, **cause.to_document()}, output=output, name=cause.cause)
    return Code.OK


def _print(cause: Diagnosis) -> None:
    mark = {"fine": ("ok", "green"), "waiting": ("waiting", "yellow")}.get(
        cause.severity, (cause.severity, "red")
    )
    console.result(f"{click.style(mark[0], fg=mark[1], bold=True)} {cause.cause}: {cause.sentence}")
    for line in cause.evidence:
        console.result(f"  {click.style('|', dim=True)} {line}")
    for each in cause.also:
        console.result(f"Also: {each.cause}: {each.sentence}")
    if cause.fix:
        console.result(f"{click.style('Fix:', bold=True)} {cause.fix}")
    for number, line in enumerate(cause.commands):
        console.result(f"{click.style('Next:' if number == 0 else '  or:', bold=True)} {line}")

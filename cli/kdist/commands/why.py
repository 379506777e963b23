"""`kdist why`: the root cause of a job's trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import options, targets
from kdist.errors import Code

if TYPE_CHECKING:
    pass


@click.command()
@options.job_argument
@options.output_option("table", "json", "yaml", "name")
@options.local_option
@options.cluster_options
def command(*, output: str, **which: Any) -> int:
    r"""Explain why a job makes no progress, and how to fix it.

    Prints the root cause, ranked before its consequences, with its evidence, a fix and the command
    to run next. It reads events, pods, exit records, the queue and the agents, and changes nothing.

    \b
    Examples:
      kdist why digits
      kdist why -f job.yaml
      kdist why digits -o json | jq -r .cause
    """
    found = targets.find(**which)
    seen, cause = found.why()
    if output == "table":
        mark = {"fine": ("ok", "green"), "waiting": ("waiting", "yellow")}.get(
            cause.severity, (cause.severity, "red")
        )
        console.paragraph(
            f"{cause.cause}: {cause.sentence}" if cause.cause != "none" else cause.sentence,
            start=f"{console.style(mark[0], mark[1], bold=True)} ",
        )
        for line in cause.evidence:
            console.paragraph(line, start=f"  {console.style('|', dim=True)} ")
        for each in cause.also:
            console.paragraph(f"{each.cause}: {each.sentence}", start="Also: ")
        if cause.fix:
            console.paragraph(cause.fix, start=f"{console.style('Fix:', bold=True)} ")
        for number, line in enumerate(map(console.name_place, cause.commands)):
            is_last = number == len(cause.commands) - 1
            shown = f"{cause.change}, then {line}" if cause.change and is_last else line
            console.result(
                f"{console.style('Next:' if number == 0 else '  or:', bold=True)} {shown}"
            )
        return Code.OK
    document = {"job": found.name, "phase": str(seen.status.phase), **cause.to_document()}
    console.emit(document, kind="Diagnosis", output=output, name=cause.cause)
    return Code.OK

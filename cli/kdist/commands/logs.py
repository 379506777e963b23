"""`kdist logs`: the logs of all ranks of a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands import targets
from kdist.commands.options import (
    accept_option,
    cluster_options,
    complete_job,
    local_option,
    output_option,
    seconds,
)
from kdist.errors import Code, UsageError
from kdist.job.job import FAILED, LogSelection
from kdist.terminal import keep_colors
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.job.job import LogLine

_COLORS = (
    "cyan",
    "green",
    "magenta",
    "blue",
    "yellow",
    "bright_cyan",
    "bright_green",
    "bright_magenta",
    "bright_blue",
)
_LEVELS = {"warning": "yellow", "error": "red"}


@click.command()
@click.argument("job", metavar="NAME|FILE", shell_complete=complete_job)
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Follow through restarts and replaced pods until the job ends.",
)
@click.option(
    "--rank",
    metavar="N,N-N|failed",
    help="Only these ranks; failed is the one whose failure ended the job.",
)
@click.option("--pod", metavar="NAME|INDEX", help="Only this pod.")
@click.option(
    "-c",
    "--container",
    metavar="NAME",
    help="Log of this container instead of the training's, such as fetch-data-0 or fetch-init.",
)
@click.option(
    "-p",
    "--previous",
    is_flag=True,
    help="Logs of the previous container instance.",
)
@click.option(
    "--since", type=seconds, metavar="DURATION", help="Only lines newer than this, e.g. 5m."
)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="LINES",
    help="Only the last LINES lines of each pod.",
)
@click.option(
    "--generation",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show the log of this generation that was kept next to the checkpoints.",
)
@click.option("--raw", is_flag=True, help="Lines as they were written, events as JSON.")
@accept_option
@local_option
@output_option("table", "json")
@cluster_options
def command(*, raw: bool, output: str, timeout: float | None, **given: Any) -> int:
    r"""Show the logs of all ranks of a job, prefixed with the pod.

    With -f it waits for the first line and says why there is none yet, follows every pod through
    restarts, and picks up new pods. It retries while the API server is unreachable, for at most
    --timeout. When no pod is left, it shows the log of the last generation that was kept next to
    the checkpoints (spec.logs). The init container that fetches spec.data[0].url is fetch-data-0,
    that of spec.train.init.url is fetch-init.

    \b
    Examples:
      kdist logs digits -f
      kdist logs digits --rank 0-3,7 --tail 100
      kdist logs digits --rank failed --previous
      kdist logs digits --generation 3
      kdist logs digits -f -c fetch-data-0

    \b
    Exit codes:
      0 shown   4 there is no such job, or nothing to read
      with -f also: 6 the job did not end within --timeout   10 the job failed   11 it was stopped
    """
    from kdist.job.goals import describe_status, exit_code
    from kdist.status import JobStatus

    which = {each: given.pop(each) for each in ("job", "local", "namespace", "context")}
    chosen = LogSelection(timeout=timeout, **given)
    if chosen.generation is not None and (
        chosen.follow or chosen.previous or chosen.since is not None
    ):
        raise UsageError("--generation cannot be combined with --follow, --previous or --since")
    if chosen.container is not None and (chosen.generation is not None or chosen.rank is not None):
        raise UsageError("--container cannot be combined with --rank or --generation")
    if chosen.generation is not None and chosen.rank == FAILED:
        raise UsageError("--generation cannot be combined with --rank failed: give its number")
    found = targets.find(**which, timeout=timeout, stays=chosen.follow)
    lines: list[dict[str, Any]] = []
    has_lines = chosen.follow
    for line in found.logs(chosen):
        has_lines = True
        if isinstance(line, JobStatus):
            console.message(describe_status(line))
            if output == "json":
                console.emit(line.to_document(), output=output, stream=True)
            return exit_code(line)
        if output == "table":
            for text in format_line(line, raw=raw):
                console.result(text)
        elif chosen.follow:
            console.emit(to_document(line), kind="LogLine", output=output, stream=True)
        else:
            lines.append(to_document(line))
    if not has_lines and chosen.rank:
        console.warning(chosen.describe_absence(found.name))
    if output == "json" and not chosen.follow:
        console.emit({"job": found.name, "lines": lines}, kind="Logs", output=output)
    return Code.OK


def to_document(line: LogLine) -> dict[str, Any]:
    """The line for programs: an event with its sentence, or the printed text."""
    from kdist.events import Entry, describe_event

    if isinstance(line, Entry):
        entry, stamp = line, None
    else:
        entry, stamp = Entry(line.pod.name, line.event, line.printed), line.stamp
    at = (entry.event or {}).get("time") or stamp
    return {
        "source": entry.node,
        "rank": entry.rank if isinstance(entry.rank, int) else None,
        "time": None if at is None else str(at),
        "text": entry.body if entry.event is None else describe_event(entry.event),
        "event": entry.event,
    }


def format_line(line: LogLine, *, raw: bool = False) -> Iterator[str]:
    """Yield the line as shown, behind the pod or the node that it comes from.

    Printed text of a pod is shown with its colours, an event with its time and as a sentence. With
    `raw` the line stays as written.
    """
    from kdist import events

    if isinstance(line, events.Entry):
        if raw and line.event is not None:
            yield f"[{line.node}] {encode_json(line.event, ensure_ascii=False)}"
        else:
            yield events.format_line(line)
        return
    color = _COLORS[(line.pod.index or 0) % len(_COLORS)]
    source = console.style(line.source, color)
    if raw or line.event is None:
        printed = keep_colors(line.text if raw else line.printed)
        yield f"{console.style(f'[{line.source}]', color)} {printed}"
        return
    event = line.event
    stamp = f"{str(event.get('time') or line.stamp)[:19]}Z"
    sentence = f"{event['event']:<21} {events.describe_event(event)}".rstrip()
    yield (
        f"{console.style(stamp, dim=True)} {source} "
        f"{console.style(sentence, _LEVELS.get(str(event.get('level'))))}"
    )

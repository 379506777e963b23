"""`kdist logs`: what all ranks of a job say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kdist import console
from kdist.commands.options import cluster_options, connect, find_job, seconds
from kdist.errors import Code, UsageError

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.events import Line, RankFilter
    from kdist.jobs.logs import LogRequest
    from kdist.status import Pod, Snapshot

_COLOURS = (
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
_FAILED = "failed"


@click.command()
@click.argument("job", metavar="NAME|FILE")
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Go on through restarts and replaced pods until the job ends.",
)
@click.option(
    "--rank",
    metavar="N,N-N|failed",
    help="Only these ranks; failed is the one whose failure ended the job.",
)
@click.option("--pod", metavar="NAME|INDEX", help="Only this pod.")
@click.option(
    "-p",
    "--previous",
    is_flag=True,
    help="Of containers that were started again: the log before that.",
)
@click.option(
    "--since", type=seconds, metavar="DURATION", help="Only lines newer than that, e.g. 5m."
)
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    metavar="LINES",
    help="Only so many last lines of each pod.",
)
@click.option("--raw", is_flag=True, help="Lines as they were written, events as JSON.")
@cluster_options
def command(job: str, *, follow: bool, raw: bool, timeout: float | None, **given: Any) -> int:
    r"""Show what all ranks of a job say, with the pod in front.

    With -f it waits while there is nothing yet and says why, follows every pod through restarts,
    and takes in new pods. An API server that goes away meanwhile is waited for, --timeout long at
    most.

    \b
    Examples:
      kdist logs digits -f
      kdist logs digits --rank 0-3,7 --tail 100
      kdist logs digits --rank failed --previous

    \b
    Exit codes:
      0 shown   4 there is no such job, or nothing to read   with -f also: 6 not over after
      --timeout 10 the job failed   11 it was stopped
    """
    from kdist.jobs.logs import LogRequest

    place = {name: given.pop(name) for name in ("namespace", "context")}
    found = find_job(job)
    cluster = connect(**place, timeout=timeout, job=found.namespace, stays=follow)
    rank, pod = given.pop("rank"), given.pop("pod")
    wanted = LogRequest(choose=lambda each: pod is None or _is_called(each, pod), **given)
    if follow and wanted.previous:
        raise UsageError("--previous is over and cannot be followed")
    return (
        _follow(cluster, found.name, wanted, rank, raw, timeout)
        if follow
        else _show(cluster, found.name, wanted, rank, raw)
    )


def _is_called(pod: Pod, wanted: str) -> bool:
    return pod.name == wanted.removeprefix("pod/") or (
        wanted.isdecimal() and pod.index == int(wanted)
    )


def _show(cluster: Cluster, name: str, wanted: LogRequest, rank: str | None, raw: bool) -> int:
    from kdist import jobs
    from kdist.jobs import logs

    seen = jobs.fetch_snapshot(cluster, name)
    chosen = _rank_filter(rank, seen) if rank else None
    _print(logs.read(cluster, seen, wanted, tell=console.message), chosen, raw)
    return Code.OK


def _follow(
    cluster: Cluster,
    name: str,
    wanted: LogRequest,
    rank: str | None,
    raw: bool,
    timeout: float | None,
) -> int:
    from kdist import jobs
    from kdist.jobs import logs

    chosen = _rank_filter(rank, jobs.fetch_snapshot(cluster, name)) if rank else None
    follower = logs.Follower(cluster, name, wanted, timeout=timeout, tell=console.message)
    _print(follower.lines(), chosen, raw)
    if follower.seen is None:
        return Code.OK
    console.message(jobs.describe_status(follower.seen.status))
    return jobs.exit_code(follower.seen.status)


def _rank_filter(given: str, seen: Snapshot) -> RankFilter:
    from kdist.events import RankFilter

    known: dict[str, list[int]] = {}
    for rank in seen.status.ranks:
        known.setdefault(rank.pod, []).append(rank.rank)
    return RankFilter(parse_ranks(given, seen), known)


def parse_ranks(given: str, seen: Snapshot) -> set[int]:
    """The ranks of `0-3,7`, or the one that failed. Raises `UsageError` for anything else."""
    if given == _FAILED:
        record = seen.status.exit_record
        if record is None or record.rank is None:
            why = f"kdist why {seen.name} -n {seen.namespace}"
            raise UsageError(f"{seen.name} knows of no rank that failed", next_command=why)
        return {record.rank}
    found: set[int] = set()
    for part in given.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--rank takes numbers such as 0,2-5, or failed; found `{given}`")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _print(lines: Iterator[Line], chosen: RankFilter | None, raw: bool) -> None:
    for line in lines:
        if chosen is None or chosen.passes(line):
            for text in format_line(line, raw=raw):
                console.result(text)


def format_line(line: Line, *, raw: bool = False) -> Iterator[str]:
    """The line with its pod in front: events in words with their time, what ranks print as it
    is.
    """
    from kdist import events

    colour = _COLOURS[(line.pod.index or 0) % len(_COLOURS)]
    source = click.style(line.source, fg=colour)
    if raw or line.event is None:
        yield f"{click.style(f'[{line.source}]', fg=colour)} {line.text if raw else line.printed}"
        return
    if line.printed.strip():
        yield f"{click.style(f'[{line.source}]', fg=colour)} {line.printed}"
    event = line.event
    stamp = f"{str(event.get('time') or line.stamp)[:19]}Z"
    told = f"{event['event']:<21} {events.describe_event(event)}".rstrip()
    yield (
        f"{click.style(stamp, dim=True)} {source} "
        f"{click.style(told, fg=_LEVELS.get(str(event.get('level'))))}"
    )

"""`kdist logs`: the logs of all ranks of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kdist import console
from kdist.commands.confirmation import approve
from kdist.commands.options import (
    accept_option,
    cluster_options,
    complete_job,
    local_option,
    seconds,
)
from kdist.commands.targets import connect, find_job, find_local
from kdist.errors import Code, UsageError
from kdist.terminal import keep_colors
from kdist_trainer.formats.json_text import encode_json

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.events import Entry
    from kdist.job.cluster.job import ClusterJob
    from kdist.job.cluster.logs import LogRequest, PodLine, RankFilter
    from kdist.job.local.job import LocalJob
    from kdist.status import Pod, Snapshot

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
_FAILED = "failed"


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
@cluster_options
def command(
    job: str,
    *,
    follow: bool,
    raw: bool,
    local: bool,
    timeout: float | None,
    generation: int | None,
    **given: Any,
) -> int:
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
    from kdist.job.cluster.logs import LogRequest

    cluster_options = {name: given.pop(name) for name in ("namespace", "context")}
    if generation is not None and (follow or given["previous"] or given["since"] is not None):
        raise UsageError("--generation cannot be combined with --follow, --previous or --since")
    if given["container"] is not None and (generation is not None or given["rank"] is not None):
        raise UsageError("--container cannot be combined with --rank or --generation")
    if generation is not None and given["rank"] == _FAILED:
        raise UsageError("--generation cannot be combined with --rank failed: give its number")
    run = find_local(job, local=local, **cluster_options)
    if run is not None and generation is not None:
        del given["container"]
        return _show_kept_of_run(run, generation, raw=raw, **given)
    if run is not None:
        return _show_run(run, follow=follow, raw=raw, **given)
    found = find_job(job)
    cluster = connect(**cluster_options, timeout=timeout, job=found.namespace, stays=follow)
    rank, pod = given.pop("rank"), given.pop("pod")
    request = LogRequest(choose=lambda each: pod is None or _matches(each, pod), **given)
    if follow and request.previous:
        raise UsageError("--previous cannot be combined with --follow")
    if follow:
        return _follow(cluster, found.name, request, rank, raw, timeout)
    chosen = _Selection(rank, pod, request.tail, raw)
    if generation is not None:
        return _show_kept(cluster, found.name, generation, chosen)
    return _show(cluster, found.name, request, chosen)


def _show_run(run: LocalJob, *, follow: bool, raw: bool, **given: Any) -> int:
    """Show the logs of a run on this machine, whose agents count as pods."""
    from kdist.job import cluster as jobs
    from kdist.job.local import logs
    from kdist.job.local.status import read_status

    if given["previous"]:
        raise UsageError(
            f"{run.name} is a run on this machine: its logs include those of earlier instances",
            next_command=run.kdist("logs"),
        )
    ranks = given["rank"]
    if ranks == _FAILED:
        record = read_status(run).exit_record
        if record is None or record.rank is None:
            raise UsageError(f"no rank of {run.name} has failed")
        ranks = str(record.rank)
    entries = logs.read_entries(
        run, follow=follow, since=given["since"], tail=given["tail"], node=given["container"]
    )
    _print_entries(entries, _Selection(ranks, given["pod"], given["tail"], raw))
    status = read_status(run)
    if not follow:
        return Code.OK
    console.message(jobs.describe_status(status))
    return jobs.exit_code(status)


class _Selection(NamedTuple):
    """Which entries of a log to show, and how."""

    ranks: str | None
    pod: str | None
    tail: int | None
    raw: bool


def _show_kept(cluster: Cluster, name: str, generation: int | None, chosen: _Selection) -> int:
    """Show the kept log of a job in the cluster."""
    from kdist import events
    from kdist.job.cluster import logs

    target = _find(cluster, name)
    with TemporaryDirectory() as folder:
        files = logs.fetch(target, Path(folder), generation=generation, notify=console.message)
        _print_entries(events.read_files(files, tail=chosen.tail), chosen)
    return Code.OK


def _show_kept_of_run(run: LocalJob, generation: int, *, raw: bool, **given: Any) -> int:
    """Show the kept log of a run on this machine."""
    from kdist import events
    from kdist.job.local import trainer_tools
    from kdist.job.local.run_dir import location_of

    checkpoints = location_of(run.root)
    with TemporaryDirectory() as folder:
        files = trainer_tools.fetch_kept_logs(
            run.name, checkpoints, Path(folder), generation=generation
        )
        entries = events.read_files(files, tail=given["tail"])
        _print_entries(entries, _Selection(given["rank"], given["pod"], given["tail"], raw))
    return Code.OK


def _print_entries(entries: Iterable[Entry], chosen: _Selection) -> None:
    """Print entries of the logs of nodes, which `--pod` selects by name or number."""
    from kdist import events
    from kdist.job.local import logs

    is_wanted = logs.select_ranks(parse_ranks(chosen.ranks, None)) if chosen.ranks else None
    for entry in entries:
        if chosen.pod and chosen.pod not in (entry.node, entry.node.rpartition("-")[2]):
            continue
        if not (is_wanted is None or is_wanted(entry)):
            continue
        if chosen.raw and entry.event is not None:
            console.result(f"[{entry.node}] {encode_json(entry.event, ensure_ascii=False)}")
        else:
            console.result(events.format_line(entry))


def _matches(pod: Pod, name_or_index: str) -> bool:
    return pod.name == name_or_index.removeprefix("pod/") or (
        name_or_index.isdecimal() and pod.index == int(name_or_index)
    )


def _show(cluster: Cluster, name: str, request: LogRequest, chosen: _Selection) -> int:
    from kdist.job import cluster as jobs
    from kdist.job.cluster import logs

    snapshot = jobs.fetch_snapshot(cluster, name)
    is_plain = not (request.previous or request.container) and request.since is None
    is_plain = is_plain and chosen.ranks != _FAILED
    if is_plain and _has_only_kept_log(cluster, snapshot):
        console.message(f"no pod of {name} is left: showing the log kept next to its checkpoints")
        return _show_kept(cluster, name, None, chosen)
    if chosen.ranks and snapshot.gap:
        console.warning(f"{snapshot.gap}: ranks of pods whose agents do not answer are not known")
    rank_filter = _rank_filter(chosen.ranks, snapshot) if chosen.ranks else None
    lines = logs.read(cluster, snapshot, request, notify=console.message)
    _print(lines, rank_filter, chosen.raw)
    return Code.OK


def _find(cluster: Cluster, name: str) -> ClusterJob:
    from kdist.job.cluster.job import ClusterJob

    return ClusterJob.find(cluster, name, approve=approve, warn=console.warning)


def _has_only_kept_log(cluster: Cluster, snapshot: Snapshot) -> bool:
    """Whether the job has no pods any more, gets none for now, and keeps its log."""
    from kdist.job.cluster import logs
    from kdist.status import Phase

    status = snapshot.status
    is_over = status.phase.terminal or status.phase is Phase.SUSPENDED
    if status.pods or not is_over:
        return False
    return logs.are_kept(_find(cluster, snapshot.name))


def _follow(
    cluster: Cluster,
    name: str,
    request: LogRequest,
    rank: str | None,
    raw: bool,
    timeout: float | None,
) -> int:
    from kdist.job import cluster as jobs
    from kdist.job.cluster import logs

    rank_filter = _rank_filter(rank, jobs.fetch_snapshot(cluster, name)) if rank else None
    follower = logs.Follower(cluster, name, request, timeout=timeout, notify=console.message)
    _print(follower.lines(), rank_filter, raw)
    is_over = follower.snapshot is not None and follower.snapshot.status.phase.terminal
    if follower.snapshot is None or (request.container is not None and not is_over):
        return Code.OK
    console.message(jobs.describe_status(follower.snapshot.status))
    return jobs.exit_code(follower.snapshot.status)


def _rank_filter(ranks: str, snapshot: Snapshot) -> RankFilter:
    from kdist.job.cluster.logs import RankFilter

    known: dict[str, list[int]] = {}
    for rank in snapshot.status.ranks:
        known.setdefault(rank.pod, []).append(rank.rank)
    return RankFilter(parse_ranks(ranks, snapshot), known)


def parse_ranks(ranks: str, snapshot: Snapshot | None) -> set[int]:
    """Parse the value of `--rank`: `0-3,7`, or `failed` for the rank that failed.

    Raises:
        UsageError: the value is neither, or no rank is known to have failed.
    """
    if ranks == _FAILED and snapshot is not None:
        record = snapshot.status.exit_record
        if record is None or record.rank is None:
            why = f"kdist why {snapshot.name} -n {snapshot.namespace}"
            raise UsageError(f"no rank of {snapshot.name} has failed", next_command=why)
        return {record.rank}
    found: set[int] = set()
    for part in ranks.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--rank takes numbers such as 0,2-5, or failed; found `{ranks}`")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _print(lines: Iterator[PodLine], rank_filter: RankFilter | None, raw: bool) -> None:
    for line in lines:
        if rank_filter is None or rank_filter.matches(line):
            for text in format_line(line, raw=raw):
                console.result(text)


def format_line(line: PodLine, *, raw: bool = False) -> Iterator[str]:
    """Yield the line as shown, behind the pod it comes from.

    Printed text is shown with its colours, an event with its time and as a sentence. With `raw` the
    line stays as written.
    """
    from kdist import events

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

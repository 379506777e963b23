"""Ranks that make no progress: which of them wait in which collective since when, and where those
stand that are in none.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdist.diagnose.rule import Diagnosis, DiagnosticContext, name_all, name_pods
from kdist.status import Phase, RankStatus, documents
from kdist.units import seconds

_SILENT = 30.0  # seconds without a heartbeat after which a rank that makes no steps is silent
_SHORT, _STEPS = 5.0, 5.0  # for a rank that makes steps: seconds, and multiples of its step time
_MAX_LOCATIONS = 4  # groups of ranks that are named
_HANG_SECONDS = 300  # the default of spec.hangTimeoutSeconds


def find_hang(ctx: DiagnosticContext) -> Diagnosis | None:
    """Ranks hang, as detected by their agents or seen in their heartbeats and collectives."""
    if ctx.status.phase not in (Phase.RUNNING, Phase.RECOVERING):
        return None
    hung = ctx.status.reason == "Hang"
    active = [rank for rank in ctx.status.ranks if rank.active]
    silent = [rank for rank in active if _is_silent(rank)]
    if not (hung or silent):
        return _find_waiting(ctx, active)
    if not silent:
        rest = "their agents have written the stacks to the log and start them again"
        fix = "the stacks in the log name the line"
        return Diagnosis(
            "hang", f"ranks hang; {rest}", "waiting", fix=fix, commands=(ctx.kdist("logs"),)
        )
    places = _group_by_location(silent)
    others = [rank for rank in active if rank not in silent and rank.silence is not None]
    since = min(rank.silence or 0.0 for rank in silent)
    what = f"{_name_ranks(silent)} made no progress" if others else "no step has finished"
    steps = [rank.step_seconds for rank in ctx.status.ranks if rank.step_seconds]
    usual = f", where a step usually takes {seconds(max(steps))}" if steps else ""
    words = "; ".join(f"{_name_ranks(ranks)} {_in(ranks, place)}" for place, ranks in places)
    evidence = [
        (
            f"{_name_ranks(ranks)} in {place}: silent for "
            f"{seconds(max(each.silence or 0.0 for each in ranks))}"
        )
        for place, ranks in places
    ]
    outlook, fix = _outlook(ctx, silent, hung=hung)
    first = places[0][1][0]
    return Diagnosis(
        "hang",
        f"{what} for {seconds(since)}{usual}: {words}{_name_unanswering(ctx, silent)}; {outlook}",
        "waiting",
        tuple(evidence),
        fix,
        (ctx.kdist("logs", "--rank", str(first.rank), "--tail", "100"), ctx.kdist("top")),
    )


def _name_unanswering(ctx: DiagnosticContext, silent: Sequence[RankStatus]) -> str:
    """The pods that ranks in collectives may wait for, whose agents do not answer while others do:
    what they do is not known.
    """
    if ctx.seen.skipped or ctx.seen.lack or not all(rank.collective for rank in silent):
        return ""
    pods = [pod for pod in ctx.pods if pod.working and not ctx.seen.reports.get(pod.name)]
    if not pods:
        return ""
    return f"; {name_pods(pods)} may keep them waiting: no agent answers there, so why is not known"


def _is_silent(rank: RankStatus) -> bool:
    """Whether its last heartbeat is too old: by a few step times, or, if it makes no steps, by
    `_SILENT`.
    """
    if rank.silence is None:
        return False
    stepping = rank.phase in ("step", "data", "sync") and rank.step_seconds
    return rank.silence > (
        max(_SHORT, _STEPS * (rank.step_seconds or 0.0)) if stepping else _SILENT
    )


def _group_by_location(silent: Sequence[RankStatus]) -> list[tuple[str, list[RankStatus]]]:
    """The ranks by collective or phase, those in no collective first: the others wait for them."""
    found: dict[str, list[RankStatus]] = {}
    for rank in sorted(silent, key=lambda each: (bool(each.collective), each.step or 0, each.rank)):
        found.setdefault(rank.collective or f"phase {rank.phase or '?'}", []).append(rank)
    return list(found.items())[:_MAX_LOCATIONS]


def _name_ranks(ranks: Sequence[RankStatus]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {name_all([str(each.rank) for each in ranks])}"


def _in(ranks: Sequence[RankStatus], place: str) -> str:
    verb = "" if len(ranks) > 1 else "s"
    if ranks[0].collective:
        return f"wait{verb} in {place}"
    lines = list(dict.fromkeys(rank.line for rank in ranks if rank.line))
    at = f", at {name_all(lines)}" if lines else ""
    return f"hang{verb} in {place}, in no collective{at}"


def _outlook(
    ctx: DiagnosticContext, silent: Sequence[RankStatus], *, hung: bool
) -> tuple[str, str]:
    """When stacks will be written, and the fix."""
    if hung:
        return (
            "their agents have written the stacks to the log and start them again",
            "the stacks in the log name the line",
        )
    limit = documents.integer(ctx.seen.job, "spec", "hangTimeoutSeconds") or _HANG_SECONDS
    left = limit - max(each.silence or 0.0 for each in silent)
    when = f"in {seconds(left)} at the earliest" if left > 0 else "soon"
    return (
        (
            f"{when} (spec.hangTimeoutSeconds: {limit}) the agents write the stacks to the "
            "log and start the ranks again"
        ),
        (
            "wait for the stacks, which name the line; a lower spec.hangTimeoutSeconds writes "
            "them sooner"
        ),
    )


def _find_waiting(ctx: DiagnosticContext, active: Sequence[RankStatus]) -> Diagnosis | None:
    """Ranks of a script, which sends no heartbeats, wait in a collective for long."""
    ranks = [rank for rank in active if rank.silence is None]
    waiting = [rank for rank in ranks if rank.collective and (rank.waiting or 0.0) >= _SILENT]
    if not waiting:
        return None
    absent = [rank for rank in ranks if not rank.collective]
    others = [rank for rank in ranks if rank.collective and rank not in waiting]
    unknown = ctx.status.world_size - len(ctx.status.ranks)
    groups = _group_by_location(waiting)
    wait = " and ".join(_describe_wait(place, each) for place, each in groups)
    if absent:
        stands = "; ".join(_describe_absent(each) for each in absent[:_MAX_LOCATIONS])
        if len(absent) > _MAX_LOCATIONS:
            stands += f"; {len(absent) - _MAX_LOCATIONS} more ranks are in no collective"
        sentence, fix = f"{stands}, while {wait}", "find out why that line does not return"
        if not any(rank.line for rank in absent):
            fix = "find out what the rank that is in no collective does: see what it printed last"
    elif unknown > 0:
        sentence = f"{wait}; what {unknown} other ranks do is not known: no agent tells"
        fix = "find out where the others are: `kdist status`, and their logs"
    elif len(groups) > 1:
        sentence = f"ranks wait for each other in different collectives: {wait}"
        fix = "all ranks must enter the same collectives in the same order"
    elif others:
        return None  # somebody has just entered one
    else:
        sentence = f"{wait}: all ranks are in it, and it does not end"
        fix = "check the network between the nodes and their devices: `kdist doctor`"
    first = (absent or waiting)[0]
    limit = documents.integer(ctx.seen.job, "spec", "collectiveTimeoutSeconds")
    ends = "the timeout that the script gave its process group" + (
        f" (by default spec.collectiveTimeoutSeconds: {limit})" if limit else ""
    )
    return Diagnosis(
        "hang",
        f"{sentence}; it ends after {ends}",
        "waiting",
        tuple(_show_rank(rank) for rank in [*absent, *waiting][:8]),
        fix,
        (ctx.kdist("logs", "--rank", str(first.rank), "--tail", "100"), ctx.kdist("top")),
    )


def _describe_wait(place: str, ranks: Sequence[RankStatus]) -> str:
    verb = "has waited" if len(ranks) == 1 else "have waited"
    longest = max(rank.waiting or 0.0 for rank in ranks)
    return f"{_name_ranks(ranks)} {verb} in {place} for {seconds(longest)}"


def _describe_absent(rank: RankStatus) -> str:
    if not rank.line:
        return f"rank {rank.rank} is in no collective, and where it stands is not known"
    return f"rank {rank.rank} has been at {rank.line} for {seconds(rank.line_seconds or 0.0)}"


def _show_rank(rank: RankStatus) -> str:
    if rank.collective:
        return f"rank {rank.rank}: in {rank.collective} for {seconds(rank.waiting or 0.0)}"
    quiet = f", nothing was seen of it for {seconds(rank.quiet)}" if rank.quiet is not None else ""
    return f"rank {rank.rank}: in no collective, at {rank.line or 'an unknown line'}{quiet}"

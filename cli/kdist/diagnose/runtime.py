"""Causes in a job whose containers run, or have run: the rendezvous, agents that do not answer;
also that nothing is wrong, or that nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdist.agent_metrics import METRICS_PORT
from kdist.diagnose.rule import Diagnosis, DiagnosticContext, name_all
from kdist.status import SEPARATE_RANKS_FIX, Phase, RankStatus, describe_separate_ranks, documents
from kdist.status.phase_decision import ASKED_TO_START
from kdist.units import age, count, number, seconds

_REFUSED = 100  # connections
_RECENT = 60.0  # seconds for which a collective or a heartbeat shows that ranks train


def find_rendezvous(ctx: DiagnosticContext) -> Diagnosis | None:
    """Agents wait at the rendezvous: how many have joined, and which pods are missing."""
    if ctx.status.reason not in ("Rendezvous", "TooFewNodes"):
        return None
    here = {
        name
        for name, report in ctx.seen.reports.items()
        if documents.text(report, "state") == "rendezvous"
    }
    wanted, most = ctx.status.nodes.min, ctx.status.nodes.max
    present = {pod.index for pod in ctx.pods if pod.name in here}
    missing = [pod for pod in ctx.pods if pod.name not in here and not pod.over]
    unmade = [str(index) for index in range(most) if index not in {pod.index for pod in ctx.pods}]
    words = [f"{pod.name} ({pod.state})" for pod in missing]
    words += (
        [f"{count(len(unmade), 'pod')} not created ({name_all(unmade)})"]
        if unmade and len(present) < wanted
        else []
    )
    sentence = f"{len(here)} of {wanted} needed nodes are at the rendezvous" + (
        f"; missing: {name_all(words)}" if words else ""
    )
    if len(here) >= wanted:
        sentence = (
            f"{len(here)} nodes are at the rendezvous and {wanted} are enough: they wait a "
            "moment for more"
        )
    limit = documents.integer(ctx.seen.job, "spec", "rendezvousTimeoutSeconds")
    end = f"; after {limit} s the job gives up" if limit else ""
    fix = f"find out why the missing pods do not start{end}"
    if not ctx.seen.reports:  # a run on this machine, whose status says how many have joined
        sentence = f"the agents meet: {ctx.status.message}"
        fix = f"wait a moment; if it stays so, see the log of the agent that is missing{end}"
    commands = (
        ctx.kdist("events"),
        *((ctx.kdist("logs", "--pod", missing[0].name),) if missing else ()),
    )
    evidence = tuple(f"pod/{pod.name}: {pod.state}" for pod in ctx.pods if not pod.over)[:8]
    return Diagnosis("rendezvous", sentence, "waiting", evidence, fix, commands)


def find_no_answer(ctx: DiagnosticContext) -> Diagnosis | None:
    """The pods run, but their agents cannot be reached."""
    if ctx.status.reason != "NoAnswer":
        return None
    working = [pod for pod in ctx.pods if pod.working]
    was_asked = ctx.seen.skipped < len(working)
    answer = f"no response on port {METRICS_PORT}" if was_asked else "not asked yet"
    evidence = tuple(f"pod/{pod.name}: {pod.state}, {answer}" for pod in working)[:4]
    fix = "see the logs; a NetworkPolicy may block the API server, or the agents may be stuck"
    return Diagnosis(
        "no-answer",
        ctx.status.message,
        "waiting",
        evidence,
        fix,
        (ctx.kdist("logs", "--tail", "20"), "kdist doctor"),
    )


def find_refused_connections(ctx: DiagnosticContext) -> Diagnosis | None:
    """Agents have closed many connections: strangers connect, or there are no descriptors."""
    found = {
        pod.name: documents.integer(ctx.seen.reports.get(pod.name), "connections_refused") or 0
        for pod in ctx.pods
        if not pod.over
    }
    many = {pod: refused for pod, refused in found.items() if refused > _REFUSED}
    if not many:
        return None
    return Diagnosis(
        "connections-refused",
        f"agents have closed {sum(many.values()):,} connections: somebody who is not part of the "
        "job connects to its pods, or they have no file descriptors left; the training goes on",
        "waiting",
        tuple(f"pod/{pod}: {refused:,} refused" for pod, refused in list(many.items())[:8]),
        "the log names the address; keep it out with a network policy "
        "(networkPolicy.enabled of the chart)",
        (ctx.kdist("logs", "--tail", "100"), ctx.kdist("top")),
    )


def find_gone(ctx: DiagnosticContext) -> Diagnosis | None:
    """The workload does not exist."""
    if ctx.status.reason != "NoWorkload":
        return None
    fix = f"apply the job again: {ctx.continuation}, or it ends at once if it was done"
    place = f" -n {ctx.namespace}" if ctx.namespace else ""
    return Diagnosis(
        "no-workload",
        ctx.status.message,
        fix=fix,
        commands=(f"kdist apply JOB.yaml{place}", ctx.kdist("events")),
    )


def find_suspended(ctx: DiagnosticContext) -> Diagnosis | None:
    """The job is suspended, or was stopped on request."""
    phase = ctx.status.phase
    if phase is Phase.SUSPENDED:
        return Diagnosis(
            "suspended",
            f"{ctx.name} is suspended",
            "waiting",
            fix="resume it",
            commands=(ctx.kdist("resume"),),
        )
    if phase is Phase.STOPPED:
        return Diagnosis(
            "stopped",
            f"{ctx.name} was {ctx.status.message}",
            "fine",
            fix=f"start it again: {ctx.continuation}",
            commands=(ctx.kdist("restart"),),
        )
    return None


def find_success(ctx: DiagnosticContext) -> Diagnosis | None:
    """The job is done."""
    if ctx.status.phase is not Phase.SUCCEEDED:
        return None
    step = f" after step {ctx.status.step:,}" if ctx.status.step is not None else ""
    kept_alive = (
        "; its pods hold their resources until a kdist command sees it"
        if ctx.status.kept_alive
        else ""
    )
    record = ctx.status.exit_record
    bad = record.nonfinite_loss if record is not None else None
    remarks = f", but its loss was {bad}" if bad is not None else ""
    ranks = record.separate_ranks if record is not None else 0
    if ranks:
        remarks += f", but {describe_separate_ranks(ranks)}"
    fix = SEPARATE_RANKS_FIX if ranks else ""
    return Diagnosis("done", f"{ctx.name} is done{step}{remarks}{kept_alive}", "fine", fix=fix)


def find_start_request(ctx: DiagnosticContext) -> Diagnosis | None:
    """A user had the job start again: its pods end, and new ones start."""
    if ctx.started is None or ctx.status.phase.terminal:
        return None
    reason, phase = ctx.status.reason, ctx.status.phase
    if not (ctx.stuck or reason in (ASKED_TO_START, "NoAnswer")) or phase is Phase.QUEUED:
        return None
    if any((pod.created or 0.0) < ctx.started for pod in ctx.pods if not pod.over):
        state = "its pods save and end first"
    elif not any(not pod.over for pod in ctx.pods):
        state = "its pods are created again"
    else:
        state = ctx.status.message or reason or "its new pods start"
    return Diagnosis(
        "start-requested",
        f"{ctx.name} starts again, as asked {ctx.ago(ctx.started)}: {state}",
        "waiting",
        tuple(f"pod/{pod.name}: {pod.state}" for pod in ctx.pods)[:8],
        "wait a moment",
        (ctx.kdist("status", "-w"),),
    )


def find_starting(ctx: DiagnosticContext) -> Diagnosis | None:
    """The job starts, or restarts, and nothing is wrong so far."""
    if not ctx.stuck:
        return None
    what = "starts again" if ctx.status.phase is Phase.RECOVERING else "starts"
    reason = ctx.status.message or ctx.status.reason or "nothing is known yet"
    reason += f": {ctx.status.fetch}" if ctx.status.fetch is not None else ""
    evidence = tuple(f"pod/{pod.name}: {pod.state}" for pod in ctx.pods)[:8]
    return Diagnosis(
        "starting",
        f"{ctx.name} {what}: {reason}",
        "waiting",
        evidence,
        "wait a moment",
        (ctx.kdist("status", "-w"),),
    )


def find_nothing_wrong(ctx: DiagnosticContext) -> Diagnosis:
    """The job trains: report its pace. Without a step or a collective that was seen of late, that
    it trains is not known.
    """
    status = ctx.status
    if (other := _find_missing(ctx) or _find_unknown(ctx)) is not None:
        return other
    parts = (
        [f"step {status.step:,}" + (f" of {status.target_steps:,}" if status.target_steps else "")]
        if status.step is not None
        else []
    )
    times = [rank.step_seconds for rank in status.ranks if rank.step_seconds]
    parts += [f"{seconds(max(times))} each"] if times else []
    parts += [f"{number(round(status.throughput))} samples/s"] if status.throughput else []
    parts += [f"loss {number(status.loss)}"] if status.loss is not None else []
    parts += [f"at risk {age(status.at_risk)}"] if status.at_risk is not None else []
    if status.step is None and (quiet := _seen_ago(status.ranks)) is not None:
        parts.append(f"it reports no steps; a collective was seen {seconds(quiet)} ago")
    parts += [f"{status.nodes} nodes"]
    smaller = (
        f"; {status.message}"
        if status.reason in ("Smaller", "NodeLost", "Suspending", "Finishing")
        else ""
    )
    trains = f"{status.name} trains ({', '.join(parts)}){smaller}"
    ranks = [rank for rank in status.ranks if rank.active]
    if status.world_size > 1 and ranks and all(rank.group is False for rank in ranks):
        return Diagnosis(
            "separate-ranks",
            f"{trains}, but {describe_separate_ranks(status.world_size)}",
            "waiting",
            fix=SEPARATE_RANKS_FIX,
            commands=(ctx.kdist("status", "-w"),),
        )
    return Diagnosis(
        "none", f"nothing is wrong: {trains}", "fine", commands=(ctx.kdist("status", "-w"),)
    )


def _seen_ago(ranks: Iterable[RankStatus]) -> float | None:
    """Seconds since the last sign of any rank; None if there was none."""
    return min((rank.quiet for rank in ranks if rank.quiet is not None), default=None)


def _find_missing(ctx: DiagnosticContext) -> Diagnosis | None:
    """Agents say that their ranks train, and fewer pods are there than the job needs: they have not
    noticed yet, or they end.
    """
    status, nodes = ctx.status, ctx.status.nodes
    if nodes.ready >= nodes.min:
        return None
    ends = f": {status.message}" if status.reason in ("Suspending", "Finishing") else ""
    return Diagnosis(
        "nodes-missing",
        f"{ctx.name} has {nodes.ready} of the {count(nodes.min, 'node')} that it needs{ends}",
        "waiting",
        fix="wait a moment: a pod that was deleted is made again; if it stays so, see the events",
        commands=(ctx.kdist("events"), ctx.kdist("status", "-w")),
    )


def _find_unknown(ctx: DiagnosticContext) -> Diagnosis | None:
    """Agents answer, and nothing shows that their ranks train: no step and no collective, or none
    of late.
    """
    ranks = [rank for rank in ctx.status.ranks if rank.active]
    if not ranks or ctx.status.reason == "Finishing":
        return None
    quiet = _seen_ago(ranks)
    beating = any(rank.silence is not None and rank.silence < _RECENT for rank in ranks)
    if beating or (quiet is not None and quiet < _RECENT):
        return None
    told = ctx.status.step is not None
    # A step that is older than these ranks counts for nothing: a script that starts again imports.
    # Agents of a version that does not tell how old a step is know of no process groups either.
    if quiet is None and told and all(rank.group is None for rank in ranks):
        return None
    if quiet is not None:
        what = f"the last step or collective that was seen began or ended {seconds(quiet)} ago"
    else:
        what = "they report no steps, and have entered no collective"
    where = [f"rank {rank.rank} is at {rank.line}" for rank in ranks if rank.line][:4]
    also = f"; {', '.join(where)}" if where else ""
    place = ("--rank", str(ranks[0].rank), "--tail", "20")
    return Diagnosis(
        "not-known",
        f"whether {ctx.name} trains is not known: {count(len(ranks), 'rank')} "
        f"{'runs' if len(ranks) == 1 else 'run'}, and {what}{also}",
        "waiting",
        tuple(_show_place(rank) for rank in ranks[:8]),
        "see what it prints; with `kdist_trainer.Reporter` a script tells its steps "
        "(docs/how-to/migrating.md)",
        (ctx.kdist("logs", *place), ctx.kdist("status", "-w")),
    )


def _show_place(rank: RankStatus) -> str:
    where = f"at {rank.line}" if rank.line else "where it stands is not known"
    since = f" for {seconds(rank.line_seconds)}" if rank.line and rank.line_seconds else ""
    return f"rank {rank.rank}: {where}{since}"

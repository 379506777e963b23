"""Causes in a job whose containers run, or have run: the rendezvous, agents that do not answer,
ranks that hang in a collective or outside of one. Also that nothing is wrong, or that nothing is
known: then warnings of Kubernetes that no other rule explains are shown as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kdist.diagnose.rule import (
    Diagnosis,
    DiagnosticContext,
    KubernetesEvent,
    clip,
    name_all,
    name_pods,
)
from kdist.spec.training_job import Spec
from kdist.status import (
    SEPARATE_RANKS_FIX,
    Phase,
    Pod,
    RankStatus,
    describe_separate_ranks,
    documents,
)
from kdist.status.job_status import ASKED_TO_START
from kdist.status.pods import describe_saved
from kdist.units import age, count, number, seconds
from kdist_trainer.formats import METRICS_PORT

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
    if unmade and len(present) < wanted:
        words.append(f"{count(len(unmade), 'pod')} not created ({name_all(unmade)})")
    absent = f"; missing: {name_all(words)}" if words else ""
    sentence = f"{len(here)} of {wanted} needed nodes are at the rendezvous{absent}"
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
        "the log names the address; the job's NetworkPolicy keeps it out if the cluster enforces "
        "policies and networkPolicy.monitoring.from of the chart does not admit it",
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
        step = ctx.status.last_checkpoint_step
        saved = "" if step is None else f"; {describe_saved([step])}"
        return Diagnosis(
            "suspended",
            f"{ctx.name} is suspended{saved}",
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
    kept_alive = ""
    if ctx.status.kept_alive:
        kept_alive = "; its pods hold their resources until a kdist command sees it"
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
    """The job trains: report its pace. Without a recent step or collective that is not known."""
    status = ctx.status
    if (other := _find_missing(ctx) or _find_unknown(ctx)) is not None:
        return other
    target = f" of {status.target_steps:,}" if status.target_steps else ""
    parts = [f"step {status.step:,}{target}"] if status.step is not None else []
    times = [rank.step_seconds for rank in status.ranks if rank.step_seconds]
    parts += [f"{seconds(max(times))} each"] if times else []
    parts += [f"{number(round(status.throughput))} samples/s"] if status.throughput else []
    parts += [f"loss {number(status.loss)}"] if status.loss is not None else []
    parts += [f"at risk {age(status.at_risk)}"] if status.at_risk is not None else []
    if status.step is None and (quiet := _seen_ago(status.ranks)) is not None:
        parts.append(f"it reports no steps; a collective was seen {seconds(quiet)} ago")
    parts += [f"{status.nodes} nodes"]
    trains = f"{status.name} trains ({', '.join(parts)})"
    if status.reason in ("Smaller", "NodeLost", "Suspending", "Finishing"):
        trains += f"; {status.message}"
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
    """Ranks train, with fewer pods than the job needs: they have not noticed yet, or they end."""
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
    """Agents answer, and no step and no recent collective shows that their ranks train."""
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


_SILENT = 30.0  # seconds without a heartbeat after which a rank that makes no steps is silent
_SHORT, _STEPS = 5.0, 5.0  # for a rank that makes steps: seconds, and multiples of its step time
_MAX_LOCATIONS = 4  # groups of ranks that are named


def find_hang(ctx: DiagnosticContext) -> Diagnosis | None:
    """Ranks hang, as detected by their agents or seen in their heartbeats and collectives."""
    if ctx.status.phase not in (Phase.RUNNING, Phase.RECOVERING):
        return None
    hung = ctx.status.reason == "Hang"
    active = [rank for rank in ctx.status.ranks if rank.active]
    silent = [rank for rank in active if _is_silent(rank)]
    if not (hung or silent):
        return _find_waiting(ctx, active)
    outlook = "their agents have written the stacks to the log and start them again"
    fix = "the stacks in the log name the line"
    if not silent:
        words, logs = f"ranks hang; {outlook}", ctx.kdist("logs")
        return Diagnosis("hang", words, "waiting", fix=fix, commands=(logs,))
    if not hung:
        default: int = Spec.model_fields["hang_timeout_seconds"].default
        limit = documents.integer(ctx.seen.job, "spec", "hangTimeoutSeconds") or default
        left = limit - max(each.silence or 0.0 for each in silent)
        when = f"in {seconds(left)} at the earliest" if left > 0 else "soon"
        outlook = (
            f"{when} (spec.hangTimeoutSeconds: {limit}) the agents write the stacks to the "
            "log and start the ranks again"
        )
        fix = (
            "wait for the stacks, which name the line; a lower spec.hangTimeoutSeconds writes "
            "them sooner"
        )
    places = _group_by_location(silent)
    others = [rank for rank in active if rank not in silent and rank.silence is not None]
    since = min(rank.silence or 0.0 for rank in silent)
    what = f"{_name_ranks(silent)} made no progress" if others else "no step has finished"
    steps = [rank.step_seconds for rank in ctx.status.ranks if rank.step_seconds]
    usual = f", where a step usually takes {seconds(max(steps))}" if steps else ""
    words = "; ".join(f"{_name_ranks(ranks)} {_in(ranks, place)}" for place, ranks in places)
    evidence = [
        f"{_name_ranks(ranks)} in {place}: silent for "
        f"{seconds(max(each.silence or 0.0 for each in ranks))}"
        for place, ranks in places
    ]
    # agents that do not answer while others do: what their ranks do is not known
    unheard = ""
    if not (ctx.seen.skipped or ctx.seen.lack) and all(rank.collective for rank in silent):
        pods = [pod for pod in ctx.pods if pod.working and not ctx.seen.reports.get(pod.name)]
        if pods:
            unheard = f"; {name_pods(pods)} may keep them waiting: no agent answers there, so why "
            unheard += "is not known"
    first = places[0][1][0]
    return Diagnosis(
        "hang",
        f"{what} for {seconds(since)}{usual}: {words}{unheard}; {outlook}",
        "waiting",
        tuple(evidence),
        fix,
        (ctx.kdist("logs", "--rank", str(first.rank), "--tail", "100"), ctx.kdist("top")),
    )


def _is_silent(rank: RankStatus) -> bool:
    """Whether its last heartbeat is older than some step times, or, if it makes no steps, than
    `_SILENT`.
    """
    if rank.silence is None:
        return False
    stepping = rank.phase in ("step", "data", "sync") and rank.step_seconds
    limit = max(_SHORT, _STEPS * (rank.step_seconds or 0.0)) if stepping else _SILENT
    return rank.silence > limit


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


_WARNING_SECONDS: Final = 900.0  # seconds for which a warning counts
_HARMLESS: Final = ("Unhealthy", "BackOff", "FailedKillPod", "NodeNotReady", "RestartJobSet")
"""How reasons begin of what follows from something else, or is so for a moment at each start or
end.
"""
_KUBELET_REFUSES: Final = (
    "UnexpectedAdmissionError",
    "NodeAffinity",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "PodTerminated",
)
"""Reasons for which a kubelet refuses a pod; also those that begin with `OutOf`."""


def find_refused_pod(ctx: DiagnosticContext) -> Diagnosis | None:
    """The kubelet has refused a pod, whose containers never ran: there is no log of it."""
    if ctx.status.phase.terminal and ctx.status.phase is not Phase.FAILED:
        return None
    record = ctx.status.exit_record
    if ctx.status.phase is Phase.RUNNING or (record is not None and record.permanent):
        return None
    for pod in ctx.pods:
        refused = pod.reason.startswith("OutOf") or pod.reason in _KUBELET_REFUSES
        past = ctx.status.phase is not Phase.FAILED and ctx.is_replaced(pod)
        if (
            not pod.over
            or not refused
            or (
                bool(documents.items(ctx.document(pod), "status", "containerStatuses"))
                and (pod.ended is not None or pod.before is not None)
            )
            or past
        ):
            continue
        message = _message(ctx, pod)
        return Diagnosis(
            "pod-refused",
            f"node {pod.node or '?'} refused pod {pod.name}: {pod.reason}: {clip(message, 200)}",
            "failed" if ctx.status.phase is Phase.FAILED else "blocked",
            (f"pod/{pod.name}: {pod.reason}: {clip(message)}", "its containers never ran"),
            "the node promises more than it has, or is shutting down: an administrator must look "
            "at it; keep the job off it with spec.nodeSelector or a taint until then",
            (
                ctx.kubectl("describe", "pod", pod.name),
                *((f"kubectl describe node {pod.node}",) if pod.node else ()),
            ),
        )
    return None


def _message(ctx: DiagnosticContext, pod: Pod) -> str:
    return pod.message or documents.text(ctx.document(pod), "status", "message")


def find_warning(ctx: DiagnosticContext) -> Diagnosis | None:
    """Kubernetes warns of a pod or of the workload, and no other rule explains it."""
    if not ctx.stuck:
        return None
    waiting = {pod.name for pod in ctx.pods if not pod.over and not pod.working}
    latest = {(each.kind, each.name): each for each in reversed(ctx.events)}
    # what came later without a warning has overcome it
    event = next((each for each in latest.values() if _counts(ctx, each, waiting)), None)
    if event is not None:
        often = f", {event.times} times" if event.times > 1 else ""
        return Diagnosis(
            "warning",
            f"Kubernetes warns of {event.kind.lower()} {event.name}: {event.reason}: "
            f"{clip(event.message, 300)} ({ctx.ago(event.at) or 'some time ago'}{often})",
            "blocked" if event.times > 1 else "waiting",
            (str(event),),
            "kdist knows no fix for it: do what the message says, or ask who runs the cluster",
            (ctx.kubectl("describe", event.kind.lower(), event.name), ctx.kdist("events")),
        )
    # else the message of a pod that does not run, or of the workload
    for pod in ctx.pods:
        message = _message(ctx, pod)
        if pod.working or pod.deleting or not message or ctx.is_replaced(pod):
            continue
        return Diagnosis(
            "warning",
            f"Kubernetes says of pod {pod.name}: {pod.reason or pod.state}: {clip(message, 300)}",
            "waiting",
            (f"pod/{pod.name}: {pod.reason or pod.state}: {clip(message)}",),
            "do what the message says, or ask who runs the cluster",
            (ctx.kubectl("describe", "pod", pod.name),),
        )
    state = ctx.seen.state
    if state is None or not state.message or state.finished is not None or state.suspended:
        return None
    return Diagnosis(
        "warning",
        f"its workload says: {state.reason or 'no reason'}: {clip(state.message, 300)}",
        "waiting",
        fix="do what the message says, or ask who runs the cluster",
        commands=(ctx.kdist("events"),),
    )


def _counts(ctx: DiagnosticContext, event: KubernetesEvent, waiting: set[str]) -> bool:
    if (
        not event.warns
        or event.reason.startswith(_HARMLESS)
        or ctx.now - event.at > _WARNING_SECONDS
        or event.lags
    ):
        return False
    if event.kind == "Pod":
        return event.name in waiting
    # if all pods were made since, a controller has done what it could not do then
    made = [pod.created for pod in ctx.pods if not pod.over and pod.created is not None]
    return len(made) < ctx.status.nodes.min or max(made) < event.at

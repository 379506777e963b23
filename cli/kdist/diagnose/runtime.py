"""Causes in a job whose containers run, or have run: lost nodes, rendezvous, hangs; also that
nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdist.agent_metrics import METRICS_PORT
from kdist.diagnose.rule import Diagnosis, DiagnosticContext, clip, name_all, name_pods
from kdist.status import Phase, Pod, RankStatus, documents
from kdist.units import count, number, seconds

_SILENT = 30.0  # seconds without a heartbeat after which a rank that makes no steps is silent
_SHORT, _STEPS = 5.0, 5.0  # for a rank that makes steps: seconds, and multiples of its step time
_REFUSED = 100  # connections
_MAX_LOCATIONS = 4  # groups of ranks that are named
_HANG_SECONDS = 300  # the default of spec.hangTimeoutSeconds


def find_lost_node(ctx: DiagnosticContext) -> Diagnosis | None:
    """A node does not respond. Its pods are not replaced as long as it may come back."""
    lost = [pod for pod in ctx.pods if pod.lost]
    if not lost or ctx.status.phase.terminal:
        return None
    node, nodes = lost[0].node, sorted({pod.node for pod in lost})
    left = ctx.status.nodes.ready
    since = _silent_since(ctx, node)
    enough = left >= ctx.status.nodes.min
    consequence = (
        f"the job continues with {left}"
        if enough
        else f"it needs {ctx.status.nodes.min} nodes and has {left}"
    )
    named = (
        f"node {node} does not answer"
        if len(nodes) == 1
        else f"the nodes {name_all(nodes)} do not answer"
    )
    fix = (
        f"Kubernetes does not replace a pod on a node that may come back: `{ctx.kdist('recover')}` "
        "does, once it is certain that the node is gone; or bring the node back, or delete it if "
        "it is gone for good"
    )
    if not enough and (most := ctx.status.nodes.max) > 1:
        fix += f"; with nodes {{min: {left or 1}, max: {most}}} the others would continue"
    return Diagnosis(
        "node-lost",
        (
            f"{named}{f' since {seconds(ctx.now - since)}' if since else ''}; "
            f"{name_pods(lost)} {_are(lost)} on it, {consequence}"
        ),
        "waiting" if enough else "blocked",
        tuple(_evidence_of_loss(ctx, lost)),
        fix,
        (ctx.kdist("recover"), f"kubectl delete node {node}"),
    )


def find_lost_account(ctx: DiagnosticContext) -> Diagnosis | None:
    """The service account was deleted while the pods run: the tokens that they have are no longer
    valid, even if another account has its name.
    """
    if ctx.status.phase.terminal:
        return None
    refused = [pod for pod, report in ctx.seen.reports.items() if _is_refused(report)]
    for pod in ctx.seen.pods:
        name = documents.text(pod, "spec", "serviceAccountName")
        account = ctx.seen.accounts.get(name)
        volumes = documents.items(pod, "spec", "volumes")
        if account is None or all(documents.text(each, "name") != "token" for each in volumes):
            continue
        made = documents.moment(account, "metadata", "creationTimestamp")
        began = documents.moment(pod, "metadata", "creationTimestamp")
        if account and not (made and began and made > began):
            continue
        what = "was deleted and made again" if account else "does not exist"
        again = "" if account else "`kdist apply` with the job file creates it again, then "
        return Diagnosis(
            "account-gone",
            f"service account {name} {what} while pod {documents.name(pod)} exists: the API server "
            "refuses its token, so its agent cannot meet the others, nor report the end",
            "blocked",
            (f"serviceaccount/{name}: {what}",),
            f"{again}`{ctx.kdist('restart')}` gives all pods new tokens; the training continues "
            "from its last checkpoint",
            (ctx.kdist("restart"),),
        )
    if not refused:
        return None
    return Diagnosis(
        "account-gone",
        f"the API server refuses the agents of {len(refused)} pods the rendezvous that it has "
        "served before: their ServiceAccount, its Role or its RoleBinding is gone or has changed; "
        "they train on to the end, and could not restart after a failure",
        "waiting",
        tuple(f"pod/{pod}: rendezvous_refused" for pod in refused[:8]),
        "`kdist apply` with the job file creates them again",
    )


def _is_refused(report: object) -> bool:
    return documents.at(report, "rendezvous_refused") is True


def _are(pods: list[Pod]) -> str:
    return "is" if len(pods) == 1 else "are"


def _silent_since(ctx: DiagnosticContext, node: str) -> float | None:
    return documents.moment(
        documents.condition(ctx.seen.nodes.get(node), "Ready"), "lastTransitionTime"
    )


def _evidence_of_loss(ctx: DiagnosticContext, lost: list[Pod]) -> list[str]:
    found = []
    for name in dict.fromkeys(pod.node for pod in lost):
        ready = documents.condition(ctx.seen.nodes.get(name), "Ready")
        if ready:
            message = clip(documents.text(ready, "message"))
            found.append(
                f"node/{name}: Ready is {documents.text(ready, 'status')}: "
                f"{documents.text(ready, 'reason')}: {message}"
            )
    found += [
        str(event)
        for event in list(
            ctx.events_of("Pod", [pod.name for pod in lost], "NodeNotReady", "TaintManagerEviction")
        )[:2]
    ]
    return found or [
        f"pod/{pod.name}: no longer ready, though its container was" for pod in lost[:3]
    ]


def find_hang(ctx: DiagnosticContext) -> Diagnosis | None:
    """Ranks hang, as detected by their agents or seen in their heartbeats."""
    hung = ctx.status.reason == "Hang"
    silent = [rank for rank in ctx.status.ranks if _is_silent(rank)]
    if ctx.status.phase not in (Phase.RUNNING, Phase.RECOVERING) or not (hung or silent):
        return None
    if not silent:
        rest = "their agents have written the stacks to the log and start them again"
        fix = "the stacks in the log name the line"
        return Diagnosis(
            "hang", f"ranks hang; {rest}", "waiting", fix=fix, commands=(ctx.kdist("logs"),)
        )
    places = _group_by_location(silent)
    others = [rank for rank in ctx.status.ranks if rank not in silent and rank.silence is not None]
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
        f"{what} for {seconds(since)}{usual}: {words}; {outlook}",
        "waiting",
        tuple(evidence),
        fix,
        (ctx.kdist("logs", "--rank", str(first.rank), "--tail", "100"), ctx.kdist("top")),
    )


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
    return (
        f"wait{verb} in {place}"
        if ranks[0].collective
        else f"hang{verb} in {place}, in no collective"
    )


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
    fix = f"find out why the missing pods do not start; after {limit or '?'} s the job gives up"
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
    evidence = tuple(
        f"pod/{pod.name}: {pod.state}, no response on port {METRICS_PORT}"
        for pod in ctx.pods
        if pod.working
    )[:4]
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
    fix = "apply the job again: it resumes from its last checkpoint, or ends at once if it was done"
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
        step = f" after step {ctx.status.step}" if ctx.status.step is not None else ""
        return Diagnosis(
            "stopped",
            f"{ctx.name} was stopped{step}; its state is saved",
            "fine",
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
    return Diagnosis("done", f"{ctx.name} is done{step}{kept_alive}", "fine")


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
    """The job trains: report its pace."""
    status = ctx.status
    parts = (
        [f"step {status.step:,}" + (f" of {status.target_steps:,}" if status.target_steps else "")]
        if status.step is not None
        else []
    )
    times = [rank.step_seconds for rank in status.ranks if rank.step_seconds]
    parts += [f"{seconds(max(times))} each"] if times else []
    parts += [f"{number(round(status.throughput))} samples/s"] if status.throughput else []
    parts += [f"loss {number(status.loss)}"] if status.loss is not None else []
    parts += [f"{status.nodes} nodes"]
    smaller = (
        f"; {status.message}"
        if status.reason in ("Smaller", "NodeLost", "Suspending", "Finishing")
        else ""
    )
    sentence = f"nothing is wrong: {status.name} trains ({', '.join(parts)}){smaller}"
    return Diagnosis("none", sentence, "fine", commands=(ctx.kdist("status", "-w"),))

"""What holds up a job whose containers run, or have run: nodes that fell silent, a rendezvous, a
hang; and that all is well.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdist.diagnose.rule import Diagnosis, DiagnosticContext, clip, count, name_all, name_pods
from kdist.status import Phase, Pod, RankStatus, documents
from kdist.units import number, seconds

# seconds without a rank's sign of life that are worth a word where it makes no steps
_SILENT = 30.0
_SHORT, _STEPS = 5.0, 5.0  # where it does: so many seconds, and so many of its usual steps
_PLACES = 4  # groups of ranks that are named
_HANG_SECONDS = 300  # the default of spec.hangTimeoutSeconds


def find_lost_node(case: DiagnosticContext) -> Diagnosis | None:
    """A node fell silent. Its pods are not replaced as long as it may come back."""
    lost = [pod for pod in case.pods if pod.lost]
    if not lost or case.status.phase.terminal:
        return None
    node, nodes = lost[0].node, sorted({pod.node for pod in lost})
    left = case.status.nodes.ready
    since = _silent_since(case, node)
    enough = left >= case.status.nodes.min
    consequence = (
        f"the job goes on with {left}"
        if enough
        else f"it needs {case.status.nodes.min} nodes and has {left}"
    )
    named = (
        f"node {node} does not answer"
        if len(nodes) == 1
        else f"the nodes {name_all(nodes)} do not answer"
    )
    fix = (
        "Kubernetes does not replace a pod on a node that may come back: bring the node back, "
        "delete it if it is gone for good, "
    )
    fix += "or taint it out of service if it is surely off"
    if not enough and (most := case.status.nodes.max) > 1:
        fix += f"; with nodes {{min: {left or 1}, max: {most}}} the others would go on"
    return Diagnosis(
        "node-lost",
        (
            f"{named}{f' since {seconds(case.now - since)}' if since else ''}; "
            f"{name_pods(lost)} {_are(lost)} on it, {consequence}"
        ),
        "waiting" if enough else "blocked",
        tuple(_evidence_of_loss(case, lost)),
        fix,
        (
            f"kubectl delete node {node}",
            f"kubectl taint nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        ),
    )


def _are(pods: list[Pod]) -> str:
    return "is" if len(pods) == 1 else "are"


def _silent_since(case: DiagnosticContext, node: str) -> float | None:
    return documents.moment(
        documents.condition(case.seen.nodes.get(node), "Ready"), "lastTransitionTime"
    )


def _evidence_of_loss(case: DiagnosticContext, lost: list[Pod]) -> list[str]:
    found = []
    for name in dict.fromkeys(pod.node for pod in lost):
        ready = documents.condition(case.seen.nodes.get(name), "Ready")
        if ready:
            said = clip(documents.text(ready, "message"))
            found.append(
                f"node/{name}: Ready is {documents.text(ready, 'status')}: "
                f"{documents.text(ready, 'reason')}: {said}"
            )
    found += [
        str(event)
        for event in list(
            case.events_of(
                "Pod", [pod.name for pod in lost], "NodeNotReady", "TaintManagerEviction"
            )
        )[:2]
    ]
    return found or [
        f"pod/{pod.name}: no longer ready, though its container was" for pod in lost[:3]
    ]


def find_hang(case: DiagnosticContext) -> Diagnosis | None:
    """Ranks stand still: the agents have noticed, or their heartbeats say so."""
    hung = case.status.reason == "Hang"
    silent = [rank for rank in case.status.ranks if _is_silent(rank)]
    if case.status.phase not in (Phase.RUNNING, Phase.RECOVERING) or not (hung or silent):
        return None
    if not silent:
        rest = "their agents have written the stacks to the log and start them again"
        fix = "the stacks in the log name the line"
        return Diagnosis(
            "hang", f"ranks stand still; {rest}", "waiting", fix=fix, commands=(case.kdist("logs"),)
        )
    places = _places(silent)
    others = [rank for rank in case.status.ranks if rank not in silent and rank.silence is not None]
    since = min(rank.silence or 0.0 for rank in silent)
    what = f"{_name_ranks(silent)} did not get on" if others else "no step has finished"
    steps = [rank.step_seconds for rank in case.status.ranks if rank.step_seconds]
    usual = f", where a step usually takes {seconds(max(steps))}" if steps else ""
    words = "; ".join(f"{_name_ranks(ranks)} {_in(ranks, place)}" for place, ranks in places)
    evidence = [
        (
            f"{_name_ranks(ranks)} in {place}: silent for "
            f"{seconds(max(each.silence or 0.0 for each in ranks))}"
        )
        for place, ranks in places
    ]
    outlook, fix = _outlook(case, silent, hung=hung)
    first = places[0][1][0]
    return Diagnosis(
        "hang",
        f"{what} for {seconds(since)}{usual}: {words}; {outlook}",
        "waiting",
        tuple(evidence),
        fix,
        (case.kdist("logs", "--rank", str(first.rank), "--tail", "100"), case.kdist("top")),
    )


def _is_silent(rank: RankStatus) -> bool:
    """Whether it should have been heard of: within a few steps, or, where no step is made, after a
    while.
    """
    if rank.silence is None:
        return False
    stepping = rank.phase in ("step", "data", "sync") and rank.step_seconds
    return rank.silence > (
        max(_SHORT, _STEPS * (rank.step_seconds or 0.0)) if stepping else _SILENT
    )


def _places(silent: Sequence[RankStatus]) -> list[tuple[str, list[RankStatus]]]:
    """Where the ranks stand, those in no collective first: the others wait for them."""
    found: dict[str, list[RankStatus]] = {}
    for rank in sorted(silent, key=lambda each: (bool(each.collective), each.step or 0, each.rank)):
        found.setdefault(rank.collective or f"phase {rank.phase or '?'}", []).append(rank)
    return list(found.items())[:_PLACES]


def _name_ranks(ranks: Sequence[RankStatus]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {name_all([str(each.rank) for each in ranks])}"


def _in(ranks: Sequence[RankStatus], place: str) -> str:
    verb = "" if len(ranks) > 1 else "s"
    return (
        f"wait{verb} in {place}"
        if ranks[0].collective
        else f"stand{verb} still in {place}, in no collective"
    )


def _outlook(
    case: DiagnosticContext, silent: Sequence[RankStatus], *, hung: bool
) -> tuple[str, str]:
    """When the stacks are there, and what to do with them."""
    if hung:
        return (
            "their agents have written the stacks to the log and start them again",
            "the stacks in the log name the line",
        )
    limit = documents.integer(case.seen.job, "spec", "hangTimeoutSeconds") or _HANG_SECONDS
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


def find_rendezvous(case: DiagnosticContext) -> Diagnosis | None:
    """Agents wait for each other: how many are there, and which pods are missing."""
    if case.status.reason not in ("Rendezvous", "TooFewNodes"):
        return None
    here = {
        name
        for name, report in case.seen.reports.items()
        if documents.text(report, "state") == "rendezvous"
    }
    wanted, most = case.status.nodes.min, case.status.nodes.max
    present = {pod.index for pod in case.pods if pod.name in here}
    missing = [pod for pod in case.pods if pod.name not in here and not pod.over]
    unmade = [str(index) for index in range(most) if index not in {pod.index for pod in case.pods}]
    words = [f"{pod.name} ({pod.state})" for pod in missing]
    words += (
        [f"{count(len(unmade), 'pod')} not made ({name_all(unmade)})"]
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
    limit = documents.integer(case.seen.job, "spec", "rendezvousTimeoutSeconds")
    fix = f"see why the missing pods do not come; after {limit or '?'} s the job gives up"
    commands = (
        case.kdist("events"),
        *((case.kdist("logs", "--pod", missing[0].name),) if missing else ()),
    )
    evidence = tuple(f"pod/{pod.name}: {pod.state}" for pod in case.pods if not pod.over)[:8]
    return Diagnosis("rendezvous", sentence, "waiting", evidence, fix, commands)


def find_no_answer(case: DiagnosticContext) -> Diagnosis | None:
    """The pods run, and what they do cannot be asked from here."""
    if case.status.reason != "NoAnswer":
        return None
    evidence = tuple(
        f"pod/{pod.name}: {pod.state}, port 9401 gives no answer"
        for pod in case.pods
        if pod.working
    )[:4]
    fix = (
        "look at the logs; a NetworkPolicy may keep the API server from the pods, or the "
        "agents may be stuck"
    )
    return Diagnosis(
        "no-answer",
        case.status.message,
        "waiting",
        evidence,
        fix,
        (case.kdist("logs", "--tail", "20"), "kdist doctor"),
    )


def find_gone(case: DiagnosticContext) -> Diagnosis | None:
    """The workload is not there."""
    if case.status.reason != "NoWorkload":
        return None
    fix = "send the job again: it resumes from its last checkpoint, or ends at once if it was done"
    place = f" -n {case.namespace}" if case.namespace else ""
    return Diagnosis(
        "no-workload",
        case.status.message,
        fix=fix,
        commands=(f"kdist apply JOB.yaml{place}", case.kdist("events")),
    )


def find_rest(case: DiagnosticContext) -> Diagnosis | None:
    """The job rests because somebody asked for it."""
    phase = case.status.phase
    if phase is Phase.SUSPENDED:
        return Diagnosis(
            "suspended",
            f"{case.name} is suspended",
            "waiting",
            fix="resume it",
            commands=(case.kdist("resume"),),
        )
    if phase is Phase.STOPPED:
        step = f" after step {case.status.step}" if case.status.step is not None else ""
        return Diagnosis(
            "stopped",
            f"{case.name} was stopped{step}; its state is saved",
            "fine",
            commands=(case.kdist("restart"),),
        )
    return None


def find_success(case: DiagnosticContext) -> Diagnosis | None:
    """The job is done."""
    if case.status.phase is not Phase.SUCCEEDED:
        return None
    step = f" after step {case.status.step:,}" if case.status.step is not None else ""
    parked = (
        "; its pods hold their resources until a kdist command sees it"
        if case.status.parked
        else ""
    )
    return Diagnosis("done", f"nothing is wrong: {case.name} is done{step}{parked}", "fine")


def find_on_its_way(case: DiagnosticContext) -> Diagnosis | None:
    """The job starts, or starts again, and nothing speaks against it."""
    if not case.stuck:
        return None
    what = "starts again" if case.status.phase is Phase.RECOVERING else "starts"
    told = case.status.message or case.status.reason or "nothing is known yet"
    evidence = tuple(f"pod/{pod.name}: {pod.state}" for pod in case.pods)[:8]
    return Diagnosis(
        "starting",
        f"{case.name} {what}: {told}",
        "waiting",
        evidence,
        "wait a moment",
        (case.kdist("status", "-w"),),
    )


def find_nothing_wrong(case: DiagnosticContext) -> Diagnosis:
    """The job trains: its pace says so."""
    status = case.status
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
        if status.reason in ("Smaller", "NodeLost", "Suspending", "Stopping", "Finishing")
        else ""
    )
    sentence = f"nothing is wrong: {status.name} trains ({', '.join(parts)}){smaller}"
    return Diagnosis("none", sentence, "fine", commands=(case.kdist("status", "-w"),))

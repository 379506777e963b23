"""Lost pods and nodes, and deleted objects that running pods need: ConfigMaps, the service account,
the right to use the rendezvous, and the key of the agents' exchange. The loss is the root cause
when the other ranks wait, restart or meet at the rendezvous.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from kdist.diagnose.failures import EVICTIONS, FOLLOWS, NODE_RESTARTED
from kdist.diagnose.rule import (
    Diagnosis,
    DiagnosticContext,
    clip,
    name_all,
    name_pods,
)
from kdist.manifest import TRAINING_JOB, name_rendezvous
from kdist.status import Phase, Pod, documents, find_successor, read_index
from kdist.status.job_status import STARTING_SECONDS
from kdist.units import count, seconds

_OUTAGE: Final = 600.0
"""Seconds for which a pod that was deleted may explain what the others do, until they train."""
_NOTICED: Final = 120.0
"""Seconds within which the others notice a loss: what ends a group later is something else."""
_NODE_REASONS: Final = ("NodeLost", "Shutdown", "NodeShutdown", "Terminated")
_ENDS: Final = ("Killing", "Preempted", "TaintManagerEviction", "Evicted", "NodeNotReady")
"""Events about a pod that exists no longer which tell of its end, or are the last of it."""
_NEW: Final = 20.0  # seconds that a pod is younger than the first one, if it came later


class _Loss(NamedTuple):
    """One pod that was lost: what happened, its evidence, when (unix time) if known, and whether
    with its node, which comes before those that a controller ends for it.
    """

    pod: str
    place: int | None
    what: str
    evidence: str
    at: float | None = None
    of_node: bool = False


def find_lost_node(ctx: DiagnosticContext) -> Diagnosis | None:
    """A node does not respond. Its pods are not replaced as long as it may come back."""
    lost = [pod for pod in ctx.pods if pod.lost]
    if not lost or ctx.status.phase.terminal:
        return None
    node, nodes = lost[0].node, sorted({pod.node for pod in lost})
    left = ctx.status.nodes.ready
    ready = documents.condition(ctx.seen.nodes.get(node), "Ready")
    since = documents.moment(ready, "lastTransitionTime")
    enough = left >= ctx.status.nodes.min
    consequence = f"it needs {ctx.status.nodes.min} nodes and has {left}"
    if enough:
        consequence = f"the job continues with {left}"
    named = f"node {node} does not answer"
    if len(nodes) > 1:
        named = f"the nodes {name_all(nodes)} do not answer"
    fix = (
        f"Kubernetes does not replace a pod on a node that may come back: `{ctx.kdist('recover')}` "
        "does, once it is certain that the node is gone; or bring the node back, or delete it if "
        "it is gone for good"
    )
    if not enough and (most := ctx.status.nodes.max) > 1:
        fix += f"; with nodes {{min: {left or 1}, max: {most}}} the others would continue"
    ago = f" since {seconds(ctx.now - since)}" if since else ""
    are = "is" if len(lost) == 1 else "are"
    return Diagnosis(
        "node-lost",
        f"{named}{ago}; {name_pods(lost)} {are} on it, {consequence}",
        "waiting" if enough else "blocked",
        tuple(_evidence_of_loss(ctx, lost)),
        fix,
        (ctx.kdist("recover"), f"kubectl delete node {node}"),
    )


def _evidence_of_loss(ctx: DiagnosticContext, lost: list[Pod]) -> list[str]:
    found = []
    for name in dict.fromkeys(pod.node for pod in lost):
        if ready := documents.condition(ctx.seen.nodes.get(name), "Ready"):
            status, reason = (documents.text(ready, key) for key in ("status", "reason"))
            message = clip(documents.text(ready, "message"))
            found.append(f"node/{name}: Ready is {status}: {reason}: {message}")
    names = [pod.name for pod in lost]
    told = ctx.events_of("Pod", names, "NodeNotReady", "TaintManagerEviction")
    found += [str(event) for event in islice(told, 2)]
    return found or [f"pod/{name}: no longer ready, though its container was" for name in names[:3]]


def find_lost_pod(ctx: DiagnosticContext) -> Diagnosis | None:
    """A pod was deleted, ended with its node, or does not answer; its peers wait or restart."""
    status, record = ctx.status, ctx.status.exit_record
    begins = status.phase in (Phase.STARTING, Phase.PENDING)
    if (
        not (begins or status.phase in (Phase.RUNNING, Phase.RECOVERING))
        or status.reason in ("Suspending", "Finishing")
        or status.location == "local"
        or (record is not None and record.permanent)
    ):
        return None
    losses = [loss for pod in ctx.pods if (loss := _read_loss(ctx, pod)) is not None]
    losses += [*_find_silent(ctx), *_find_deleted(ctx)]
    found = [loss for loss in losses if not _came_before(ctx, loss) and not _was_asked(ctx, loss)]
    if begins:  # all pods are new: only what is known to have ended those before them is a loss
        found = [loss for loss in found if loss.of_node or None not in (loss.at, loss.place)]
    latest = max((loss.at or ctx.now for loss in found), default=ctx.now)
    # where another pod had begun before the latest loss, the present one, nothing is lost now
    begun = [(pod.index, pod.started or 0.0) for pod in ctx.pods if not pod.over]
    found = [
        loss
        for loss in found
        if loss.at is None
        or not any(place == loss.place and loss.at < at < latest for place, at in begun)
    ]
    if not found:
        return None
    found.sort(key=lambda loss: (not loss.of_node, loss.at or ctx.now))
    # of several losses at one place the first is the present one
    places = {loss.pod if loss.place is None else loss.place: loss for loss in reversed(found)}
    shown = list(places.values())[::-1]
    words = "; ".join(loss.what for loss in shown[:3])
    if len(shown) > 3:
        words += f"; {len(shown) - 3} more pods"
    ready, least = status.nodes.ready, status.nodes.min
    later = "the job continues with " if ready >= least else f"it needs {least} nodes and has "
    state = "the others meet at the rendezvous" if ctx.stuck else f"{later}{ready}"
    present = "there is no new pod in its place yet"
    if new := _find_successors(ctx, shown):
        present = "in its place: " + name_all([f"{pod.name} ({pod.state})" for pod in new])
    return Diagnosis(
        "pod-lost",
        f"{words}; {present}; {state}",
        "waiting",
        tuple(dict.fromkeys(loss.evidence for loss in shown if loss.evidence))[:8],
        _describe_future(ctx) + ("" if new or status.backend != "job" else _describe_pause(ctx)),
        (ctx.kdist("events"), ctx.kdist("status", "-w")),
    )


def _describe_pause(ctx: DiagnosticContext) -> str:
    """Why the new pod may be long in coming if a Job makes it."""
    return (
        "; a Job's controller replaces a lost pod after 10 s and waits twice as long after each "
        "further loss, up to 10 min: where pods are lost often, use jobset, statefulset or "
        f"pytorchjob (spec.backend), which do not wait; `{ctx.kdist('restart')}` makes a new Job, "
        "which begins at 10 s again"
    )


def _describe_future(ctx: DiagnosticContext) -> str:
    """What happens once the new pod is there."""
    if ctx.may_end:
        return (
            "nothing, if its script has opened a Checkpointer: it resumes once the new pod starts; "
            "if it has not, the job ends, because its files are its own (maxRestarts starts it "
            "again)"
        )
    if documents.at(ctx.seen.job, "spec", "script") is not None:
        return f"nothing, if the new pod starts: {ctx.continuation}"
    return (
        "nothing, if the new pod starts: the training continues from what the others have kept, or "
        "from its last checkpoint"
    )


def _came_before(ctx: DiagnosticContext, loss: _Loss) -> bool:
    """Whether the job has gone on since, or another failure has ended the group."""
    if loss.at is None:
        return False
    if ctx.has_gone_on_since(loss.at):
        return True
    if (failure := ctx.status.last_failure) is None or failure.time is None:
        return False
    by_itself = failure.primary and failure.cause not in FOLLOWS
    return failure.time > loss.at + (0.0 if by_itself else _NOTICED)


def _was_asked(ctx: DiagnosticContext, loss: _Loss) -> bool:
    """Whether the pod ended because a user had the job start again, or before that."""
    if ctx.started is None:
        return False
    pod = next((each for each in ctx.pods if each.name == loss.pod), None)
    if pod is not None and (pod.deleting or loss.at is None):
        return (pod.created or 0.0) < ctx.started
    new = [each.created for each in ctx.pods if (each.created or 0.0) >= ctx.started]
    first = min((each for each in new if each is not None), default=ctx.now)
    return (loss.at or ctx.started) <= first


def _read_loss(ctx: DiagnosticContext, pod: Pod) -> _Loss | None:
    """What the pod itself says: it is being deleted, or its container ended with its node."""
    if pod.lost:
        return None  # of the node that does not respond
    if pod.deleting:
        why = EVICTIONS.get(pod.reason, ("",))[0]
        what = f"pod {pod.name} is being deleted" + (f": {why}" if why else "")
        return _Loss(pod.name, pod.index, what, f"pod/{pod.name}: {pod.state}")
    end = pod.ended or pod.before
    of_node = (
        end is not None
        and not end.record
        and (
            end.reason == "ContainerStatusUnknown"
            or (end.code == NODE_RESTARTED and end.reason in ("Unknown", "Error", ""))
        )
    )
    if not (of_node or (pod.over and pod.reason in _NODE_REASONS)):
        return None
    at = end.at if end else None
    if not _is_present(ctx, pod, at):
        return None
    node = f" {pod.node}" if pod.node else ""
    what = f"pod {pod.name} ended with its node{node}, which was restarted or shut down"
    said = pod.message or (f"{end.reason}, exit code {end.code}" if end else pod.reason)
    return _Loss(pod.name, pod.index, what, f"pod/{pod.name}: {clip(said)}", at, of_node=True)


def _is_present(ctx: DiagnosticContext, pod: Pod, at: float | None) -> bool:
    """Whether a loss may explain what is so now: nothing replaces the pod, or it was only just
    lost.
    """
    successor = find_successor(pod, ctx.pods) or (pod if not pod.over else None)
    if successor is None or (at is not None and ctx.now - at < _NOTICED):
        return True
    if not successor.running:
        return not successor.troubled
    return successor.started is not None and ctx.now - successor.started < _NOTICED


def _trains(ctx: DiagnosticContext, pod: Pod) -> bool:
    state = documents.text(ctx.seen.reports.get(pod.name), "state")
    return pod.working and state in ("running", "checkpointing")


def _find_deleted(ctx: DiagnosticContext) -> Iterator[_Loss]:
    """Deleted pods: known by the events of their end, or by an index without a pod or with a new
    one.
    """
    here = {pod.name for pod in ctx.pods}
    places = {pod.index for pod in ctx.pods if not pod.over}
    first = min((pod.created for pod in ctx.pods if pod.created), default=ctx.now)
    made = documents.moment(ctx.seen.workload, "metadata", "creationTimestamp") or 0.0
    for index in range(ctx.status.nodes.max):
        newest = max(
            (pod for pod in ctx.pods if pod.index == index and not pod.over),
            key=lambda pod: pod.created or 0.0,
            default=None,
        )
        if newest is not None and (
            _trains(ctx, newest) or newest.deleting or newest.lost or newest.troubled
        ):
            continue
        gone = next(
            (
                event
                for event in ctx.events
                if event.kind == "Pod"
                and event.at >= made
                and event.reason in _ENDS
                and read_index(event.name) == index
                and (event.name not in here or (newest and event.at < (newest.created or 0.0)))
                and ctx.now - event.at < _OUTAGE
            ),
            None,
        )
        if gone is not None:
            # a kubelet that comes back ends it later: "Cancelling deletion" is said then
            told = ctx.events_of(
                "Pod", [gone.name], "TaintManagerEviction", "NodeNotReady", "Scheduled"
            )
            words = [(one.reason, one.message) for one in told if one.at <= gone.at]
            reasons = (reason for reason, said in words if not said.startswith("Cancelling"))
            of_node = next(reasons, "Scheduled") != "Scheduled"
            why = f": {EVICTIONS['DeletionByTaintManager'][0]}" if of_node else ""
            what = f"pod {gone.name} was deleted {ctx.ago(gone.at)}".rstrip() + why
            yield _Loss(gone.name, index, what, str(gone), gone.at, of_node=of_node)
        elif index not in places and (
            any(pod.index == index or pod.troubled for pod in ctx.pods) or not ctx.pods
        ):
            continue  # its end is in the pod that is over, or the others tell more
        elif index not in places and index >= ctx.status.nodes.min:
            continue  # an elastic job may never have had it
        elif index not in places:
            yield _Loss(f"#{index}", index, f"the pod of index {index} exists no longer", "")
        elif any(pod.over and pod.index == index for pod in ctx.pods):
            continue  # nor is the one before it gone
        elif (
            newest is not None  # it has come after the others, and has only just started
            and ctx.stuck
            and (newest.created or 0.0) - first > _NEW
            and (newest.started is None or ctx.now - newest.started < _NOTICED)
        ):
            what = (
                f"pod {newest.name} is new, made {ctx.ago(newest.created)}: the one before it is "
                "gone, and what ended it is not known"
            )
            evidence = f"pod/{newest.name}: {newest.state}"
            yield _Loss(newest.name, index, what, evidence, newest.created)


def _find_silent(ctx: DiagnosticContext) -> Iterator[_Loss]:
    """Pods that run as far as Kubernetes knows, and whose agents do not answer while others do."""
    answering = {name for name, report in ctx.seen.reports.items() if report}
    if not answering or ctx.seen.skipped or ctx.seen.lack:
        return
    peers = [documents.mapping(report, "peers") for report in ctx.seen.reports.values()]
    silent = {each for peer in peers for each in documents.texts(peer, "silent")}
    heard = {each for peer in peers for each in documents.texts(peer, "heard")}
    for pod in ctx.pods:
        loads = pod.started is None or ctx.now - pod.started < STARTING_SECONDS
        if not pod.working or pod.deleting or pod.name in answering or loads:
            continue
        address = documents.text(ctx.document(pod), "status", "podIP")
        # others still train: that it cannot be asked from here is no loss
        if address not in silent and (address in heard or not ctx.stuck):
            continue
        node = f" on node {pod.node}" if pod.node else ""
        yield _Loss(
            pod.name,
            pod.index,
            f"pod {pod.name}{node} does not answer, though Kubernetes has it as running: its node, "
            "the network to it or its agent is lost",
            f"pod/{pod.name}: {pod.state}, no answer of its agent",
        )


def _find_successors(ctx: DiagnosticContext, losses: list[_Loss]) -> list[Pod]:
    """The pods that have taken the places of those that were lost, perhaps under the same name."""
    lost = {loss.pod: loss.at for loss in losses}

    def is_lost(pod: Pod) -> bool:
        at = lost.get(pod.name, 0.0)
        return at is None or max(pod.created or 0.0, pod.started or 0.0) < at

    indexes = {loss.place for loss in losses}
    return [
        pod
        for pod in ctx.pods
        if pod.index in indexes
        and not pod.over
        and not pod.deleting
        and not (is_lost(pod) and pod.working and not ctx.seen.reports.get(pod.name))
    ]


def find_lost_account(ctx: DiagnosticContext) -> Diagnosis | None:
    """The service account was deleted while the pods run: the tokens that they have are no longer
    valid, even if another account has its name.
    """
    if ctx.status.phase.terminal:
        return None
    # what one that ends was made from may be gone with the job that it belongs to
    stays = {pod.name for pod in ctx.pods if not pod.over and not pod.deleting}
    refused = [
        pod for pod, report in ctx.seen.reports.items() if pod in stays and _is_refused(ctx, report)
    ]
    for pod in ctx.seen.pods:
        if documents.name(pod) not in stays:
            continue
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
            f"{again}`{ctx.kdist('restart')}` gives all pods new tokens; {ctx.continuation}",
            (ctx.kdist("restart"),),
        )
    if not refused:
        return None
    told = [documents.text(ctx.seen.reports[pod], "rendezvous_refusal") for pod in refused]
    why, fix = _REFUSALS.get(next(filter(None, told), "")[:3], _REFUSALS[""])
    return Diagnosis(
        "account-gone",
        f"the API server refuses the agents of {count(len(refused), 'pod')} the rendezvous that it "
        f"has served before: {why}; they train on to the end, and could not restart after a "
        "failure",
        "waiting",
        tuple(
            f"pod/{pod}: {how or 'rendezvous_refused'}"
            for pod, how in list(zip(refused, told, strict=True))[:8]
        ),
        fix.format(restart=ctx.kdist("restart")),
    )


_APPLY = "`kdist apply` with the job file creates {} again"
_REFUSALS: Final = {
    "401": (
        "it does not accept their token (401): their ServiceAccount was deleted or made again, or "
        "the token has expired",
        f"{_APPLY.format('the ServiceAccount')}, then `{{restart}}` gives all pods new tokens",
    ),
    "403": (
        "their right to its ConfigMap is gone (403): the Role or the RoleBinding of the job",
        _APPLY.format("them"),
    ),
    "404": ("its ConfigMap was deleted (404)", _APPLY.format("it")),
    "": (
        "their ServiceAccount, its Role or its RoleBinding is gone or has changed",
        _APPLY.format("them"),
    ),
}
"""What a refusal means, and the fix, by the status that the API server answers with."""


def find_lost_config_map(ctx: DiagnosticContext) -> Diagnosis | None:
    """The ConfigMap that holds the job was deleted, and a pod waits for it, or all train."""
    return None if _stands_by(ctx) else _diagnose_lost_config_map(ctx)


def find_unused_config_map(ctx: DiagnosticContext) -> Diagnosis | None:
    """The same where all pods have started with it, and something else stops the training."""
    return _diagnose_lost_config_map(ctx) if _stands_by(ctx) else None


def _stands_by(ctx: DiagnosticContext) -> bool:
    """Whether nothing that the job does not do now is for lack of its ConfigMap."""
    alive = [pod for pod in ctx.pods if not pod.over and not pod.deleting]
    is_missing = len(alive) < ctx.status.nodes.min
    return ctx.stuck and not is_missing and all(pod.has_run for pod in alive)


def _diagnose_lost_config_map(ctx: DiagnosticContext) -> Diagnosis | None:
    alive = [pod for pod in ctx.pods if not pod.over and not pod.deleting]
    if ctx.seen.config_map or not alive or ctx.status.location == "local":
        return None
    evidence = [f"pod/{pod.name}: {pod.state}" for pod in alive[:4]]
    working = sum(pod.working for pod in alive)
    goes_on = (
        f"{count(working, 'pod')} of the job {'runs' if working == 1 else 'run'} on with what "
        f"{'it has' if working == 1 else 'they have'} read, and a new pod cannot start"
    )
    if not working:
        goes_on = f"{count(len(alive), 'new pod')} of the job cannot start without it"
    return Diagnosis(
        "configmap-gone",
        f"{ctx.missing(f'ConfigMap {ctx.name}')}, it was deleted: {goes_on}",
        "blocked",
        (f"configmap/{ctx.name}: not found", *evidence),
        "`kdist apply` with the job file creates it again; nothing is lost",
        ("kdist apply JOB.yaml" + (f" -n {ctx.namespace}" if ctx.namespace else ""),),
    )


def _is_refused(ctx: DiagnosticContext, report: object) -> bool:
    """Whether the API server refuses the agent something that is still not there: it asks again
    only a moment after its ConfigMap has come back.
    """
    told = documents.text(report, "rendezvous_refusal")
    back = told.startswith("404") and name_rendezvous(ctx.name) in ctx.seen.config_maps
    return documents.at(report, "rendezvous_refused") is True and not back


KEY_MISSING: Final = "ExchangeKeyMissing"
"""Of the event by which the controller says that it could not create the Secret."""


def find_missing_key(ctx: DiagnosticContext) -> Diagnosis | None:
    """The Secret with the key of the agents' exchange is missing, which costs requests and time."""
    if ctx.status.phase.terminal:
        return None
    reported = [
        documents.at(ctx.seen.reports.get(pod.name), "exchange_key")
        for pod in ctx.pods
        if not pod.over
    ]
    without = [
        pod.name
        for pod in ctx.pods
        if not pod.over and documents.at(ctx.seen.reports.get(pod.name), "exchange_key") is False
    ]
    events = list(ctx.events_of(TRAINING_JOB[1], [ctx.name], KEY_MISSING))
    if not without and (not events or True in reported):
        return None  # an agent that has the key knows better than an event of the past
    return Diagnosis(
        "exchange-key-missing",
        "the Secret with the key of the agents' exchange is missing: they exchange through the "
        "ConfigMap alone, which costs requests, and notice later which of them are lost; the "
        "training goes on",
        "fine",
        (
            *(f"pod/{name}: no key is mounted" for name in without[:4]),
            *map(str, events[:1]),
        ),
        "who applies the job, or the controller, needs the right to create secrets; then "
        f"`{ctx.kdist('restart')}` after another `kdist apply`",
        (f"kdist doctor -n {ctx.namespace}", ctx.kdist("restart")),
    )

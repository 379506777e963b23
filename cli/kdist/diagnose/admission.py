"""Why there are no pods: the job waits in a queue, the API server rejects its pods, or the
controller does not accept the TrainingJob, does not act on it, or waits for a restart.
"""

from __future__ import annotations

import re

from kdist.backends import operators, workload_kinds
from kdist.diagnose.rule import Cause, Diagnosis, DiagnosticContext, clip
from kdist.manifest import group_kind
from kdist.status import CONTROLLER_FIX, Phase, documents
from kdist.units import seconds

# seconds before a controller counts as idle: one that is known to be down, any other
_SHORT, _LONG = 5.0, 30.0
_WORKLOADS = [kind for _, kind in workload_kinds()]
_REJECTED = ("FailedCreate", "FailedCreatePod", "JobCreationFailed", "SuspendedJobCreationFailed")
_CREATED = ("SuccessfulCreate", "SuccessfulCreatePod")


def find_queue(ctx: DiagnosticContext) -> Diagnosis | None:
    """Kueue has not admitted the job: report its reason."""
    if ctx.status.phase is not Phase.QUEUED:
        return None
    queue, admission = ctx.status.queue, ctx.seen.admission
    reserved = documents.condition(admission, "QuotaReserved")
    evicted = documents.condition(admission, "Evicted")
    message = (
        documents.text(reserved, "message")
        or documents.text(evicted, "message")
        or ctx.status.message
    )
    evidence = (f"workload/{documents.name(admission)}: {clip(message)}",) if admission else ()
    commands: tuple[str, ...] = (
        ctx.kubectl("get", "localqueue", queue),
        ctx.kubectl("get", "workloads.kueue.x-k8s.io"),
    )
    if documents.text(reserved, "reason") == "Inadmissible" or "doesn't exist" in message:
        return Diagnosis(
            "queue-unusable",
            f"the queue {queue} cannot admit the job: {clip(message, 200)}",
            evidence=evidence,
            fix="set spec.queue to a LocalQueue of this namespace whose ClusterQueue is active",
            commands=(ctx.kubectl("get", "localqueues"),),
        )
    if documents.text(evicted, "status") == "True":
        why = documents.text(evicted, "reason") or "evicted"
        sentence = f"the queue {queue} has evicted the job ({why}); it waits to be admitted again"
    elif outage := _describe_outage(ctx, operators.QUEUE):
        fix = "an administrator must restore Kueue; the job then continues by itself"
        sentence = f"the queue {queue} admits nothing: {outage.replace('LocalQueue', 'Kueue')}"
        commands = (_describe(ctx, operators.QUEUE), *commands)
        return Diagnosis("operator-absent", sentence, evidence=evidence, fix=fix, commands=commands)
    elif admission is None:
        sentence = (
            f"the queue {queue} has not seen the job: Kueue may not be running, or "
            "may not support this kind"
        )
    elif "maximum capacity" in message:
        fix = "request less in spec.resources or spec.nodes, or have the queue's quota raised"
        sentence = f"the job is too large for the queue {queue}: {clip(message, 300)}"
        return Diagnosis("queue-too-small", sentence, evidence=evidence, fix=fix, commands=commands)
    else:
        sentence = f"the queue {queue} has no room for the job yet: {clip(message, 300)}"
    fix = "wait, request less, or raise the quota"
    return Diagnosis("queued", sentence, "waiting", evidence, fix, commands)


def find_rejection(ctx: DiagnosticContext) -> Diagnosis | None:
    """The API server rejects pods that the job needs (or the volume, or the Job)."""
    return _diagnose_rejection(ctx) if ctx.here < ctx.status.nodes.min else None


def find_refused_growth(ctx: DiagnosticContext) -> Diagnosis | None:
    """The API server rejects more pods than the job needs: the pods that exist have another
    problem.
    """
    enough = ctx.status.nodes.min <= ctx.here < ctx.status.nodes.max
    return _diagnose_rejection(ctx) if enough else None


def _diagnose_rejection(ctx: DiagnosticContext) -> Diagnosis | None:
    """The latest rejection, unless pods were created after it or none is missing."""
    is_whole = ctx.status.nodes.ready >= ctx.status.nodes.max
    if not ctx.stuck and not any(pod.over for pod in ctx.pods) and is_whole:
        return None
    of_workload = [each for each in ctx.events if each.kind in _WORKLOADS]
    refused = (each for each in of_workload if each.reason in _REJECTED and not each.lags)
    event = next(refused, None)
    made = next((each.at for each in of_workload if each.reason in _CREATED), 0.0)
    has_enough = sum(not pod.over for pod in ctx.pods) >= ctx.status.nodes.min
    if ctx.status.phase.terminal or event is None or (event.at < made and has_enough):
        return None
    amounts = re.search(r"requested: ([^:]+?), used: ([^:]+?), limited: (.+?)$", event.message)
    service, show = operators.find_webhook_home(event.message)
    use = "asks for {}, {} in use, the limit is {}"
    named = {
        "namespace": ctx.namespace,
        "use": f": {use.format(*amounts.groups())}" if amounts else "",
        "service": service,
    }
    for pattern, cause, sentence, fix, command in _REJECTIONS:
        if found := re.search(pattern, event.message, re.DOTALL):
            groups = (clip(found[0], 200), *(clip(each, 300) for each in found.groups()))
            line = command if isinstance(command, str) else ctx.kubectl(*command)
            commands = [line.format(*groups, **named) or ctx.kdist("events")]
            if cause == "webhook-away" and show:
                commands.insert(0, show)
            if cause == "no-service-account" and found[1].rpartition("/")[2] == ctx.name:
                fix = "apply the job again: it creates its own"
            return Diagnosis(
                cause,
                sentence.format(*groups, **named),
                evidence=(str(event),),
                fix=fix.format(*groups),
                commands=tuple(commands),
            )
    return Diagnosis(
        "pods-refused",
        f"pods cannot be created: {clip(event.message, 200)}",
        evidence=(str(event),),
        fix="see the message",
        commands=(ctx.kdist("events"),),
    )


# (pattern of the message, cause, sentence, fix, command); the first match counts. {0} is what
# matches, {1} and {2} are its groups. A command that is a tuple has kubectl's arguments, for the
# job's namespace.
_REJECTIONS: tuple[tuple[str, Cause, str, str, str | tuple[str, ...]], ...] = (
    (
        r"exceeded quota: ([^,\s]+)",
        "quota",
        "the quota {1} of the namespace is used up{use}",
        "request less in spec.resources or spec.nodes, end other jobs in the namespace, "
        "or have the quota raised",
        ("describe", "resourcequota", "{1}"),
    ),
    (
        r"failed quota: ([^:\s]+): must specify ([^;]+)",
        "quota",
        "the quota {1} requires every pod to specify its resources",
        "name it for every container: spec.resources, or spec.podTemplate for what you added ({2})",
        ("describe", "resourcequota", "{1}"),
    ),
    (
        r'violates PodSecurity "([^"]+)": (.+)',
        "pod-security",
        "Pod Security level {1} of the namespace rejects the pods: {2}",
        "what kdist renders passes `restricted`: remove from spec.podTemplate what it "
        "complains about",
        "kubectl get namespace {namespace} --show-labels",
    ),
    (
        r'admission webhook "([^"]+)" denied the request: ?(.*)',
        "webhook-refused",
        "the admission webhook {1} rejects the pods: {2}",
        "change what it complains about, or ask whoever runs the webhook",
        "",
    ),
    (
        r'failed calling webhook "([^"]+)"',
        "webhook-away",
        "the admission webhook {1}{service} does not answer, so nothing can be created",
        "an administrator must restore the webhook's service, or remove its configuration",
        "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations",
    ),
    (
        r"ValidatingAdmissionPolicy '([^']+)'[^:]*denied request: ?(.*)",
        "policy-refused",
        "the admission policy {1} rejects the pods: {2}",
        "change what it complains about, or ask an administrator",
        "",
    ),
    (
        r"error looking up service account (\S+):",
        "no-service-account",
        "the service account {1} does not exist",
        "create it, or name an existing one in spec.serviceAccountName",
        "kdist apply JOB.yaml -n {namespace}",
    ),
    (
        r"no PriorityClass with name (\S+) was found",
        "no-priority-class",
        "there is no PriorityClass {1}",
        "set spec.priorityClass to one that exists",
        "kubectl get priorityclasses",
    ),
    (
        r"(?:maximum|minimum) [\w./-]+ usage per \w+ is .+",
        "limit-range",
        "a LimitRange of the namespace rejects the pods: {0}",
        "bring spec.resources within the limits",
        ("describe", "limitrange"),
    ),
)


def find_idle_operator(ctx: DiagnosticContext) -> Diagnosis | None:
    """The workload has had no pods for a while: its controller does not run, or may not."""
    workload, age = ctx.seen.workload, ctx.status.age
    is_queued = ctx.status.phase is Phase.QUEUED
    if not ctx.stuck or ctx.pods or workload is None or age is None or is_queued:
        return None
    own = group_kind(documents.text(workload, "apiVersion"), documents.text(workload, "kind"))
    kind = own[1]
    touched = bool(documents.items(workload, "status", "conditions"))
    needed = [own, *(operators.OPERATORS[own].needs if own in operators.OPERATORS else ())]
    outage = [words for each in needed if (words := _describe_outage(ctx, each))]
    if age < (_SHORT if outage else _LONG) or (touched and not outage):
        return None
    names = [
        f"*{operators.OPERATORS[each].part}*" for each in needed if each in operators.OPERATORS
    ]
    called = f" (a deployment called {' and '.join(names)})" if names else ""
    why = "; ".join(outage) or f"its controller{called} may not be running"
    return Diagnosis(
        "operator-absent",
        f"no pods have been created for the {kind} for {seconds(age)}: {why}",
        evidence=(f"{kind.lower()}/{ctx.name}: no {'new ' if touched else ''}status, no pods",),
        fix=(
            f"an administrator must restore the controller of {kind}; the job then continues "
            "by itself"
        ),
        commands=(
            *(_describe(ctx, each) for each in needed if _describe_outage(ctx, each)),
            ctx.kubectl("get", kind.lower(), ctx.name, "-o", "yaml"),
            "kdist doctor",
        ),
    )


def _describe_outage(ctx: DiagnosticContext, kind: tuple[str, str]) -> str:
    """A sentence if the controller of a kind is down; empty if it runs, or may not be seen."""
    known = kind in operators.OPERATORS
    found = operators.find_deployment(ctx.seen.deployments, kind) if known else None
    if found is None:
        return ""
    ready, wanted = operators.count_ready(found)
    place = f"{documents.text(found, 'metadata', 'namespace')}/{documents.name(found)}"
    if ready:
        return ""
    return f"the controller of {kind[1]} does not run: 0 of {wanted} replicas of {place} are ready"


def _describe(ctx: DiagnosticContext, kind: tuple[str, str]) -> str:
    found = operators.find_deployment(ctx.seen.deployments, kind)
    return (
        f"kubectl describe deployment {documents.name(found)} -n "
        f"{documents.text(found, 'metadata', 'namespace')}"
    )


def find_refusal(ctx: DiagnosticContext) -> Diagnosis | None:
    """The controller does not accept the TrainingJob as it is, and nothing of it runs."""
    return None if _has_objects(ctx) else _diagnose_refusal(ctx)


def find_refused_change(ctx: DiagnosticContext) -> Diagnosis | None:
    """The controller does not accept a change of the TrainingJob: what runs is as it was before."""
    return _diagnose_refusal(ctx) if _has_objects(ctx) else None


def _has_objects(ctx: DiagnosticContext) -> bool:
    return bool(ctx.pods) or ctx.seen.workload is not None


def _diagnose_refusal(ctx: DiagnosticContext) -> Diagnosis | None:
    state = ctx.status.resource
    if state is None or not state.refusal:
        return None
    return Diagnosis(
        "not-accepted",
        f"TrainingJob {ctx.name} is not accepted: {clip(state.refusal)}",
        evidence=(f"trainingjob/{ctx.name}: generation {state.generation}: Accepted is False",),
        fix="change the job file, and apply it again; what runs stays as it was",
        commands=("kdist apply job.yaml", ctx.kubectl("describe", "trainingjob", ctx.name)),
    )


def find_absent_controller(ctx: DiagnosticContext) -> Diagnosis | None:
    """No controller has ever acted on the TrainingJob."""
    if ctx.status.reason != "NoController":
        return None
    return Diagnosis(
        "controller-absent",
        f"no controller acts on TrainingJob {ctx.name}, so its objects do not exist",
        evidence=(f"trainingjob/{ctx.name}: no status",),
        fix=CONTROLLER_FIX,
        commands=(
            f"kdist doctor -n {ctx.namespace}",
            ctx.kubectl("get", "trainingjob", ctx.name, "-o", "yaml"),
        ),
    )


def find_outdated(ctx: DiagnosticContext) -> Diagnosis | None:
    """The TrainingJob has changes that take effect with the next restart."""
    state = ctx.status.resource
    if state is None or not state.outdated or ctx.status.phase.terminal:
        return None
    return Diagnosis(
        "outdated",
        f"changes of {ctx.name} wait for a restart: {clip(state.outdated)}",
        "waiting",
        evidence=(f"trainingjob/{ctx.name}: Outdated is True",),
        fix="restart the job; it saves first, and continues from there",
        commands=(ctx.kdist("restart"),),
    )

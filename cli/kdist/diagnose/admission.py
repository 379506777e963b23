"""Why there are no pods: the job waits in a queue, the API server rejects its pods, or the
controller does not accept the TrainingJob, does not act on it, or waits for a restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kdist.backends import operators
from kdist.diagnose.rule import Diagnosis, DiagnosticContext, KubernetesEvent, clip
from kdist.status import CONTROLLER_FIX, Phase, documents
from kdist.units import seconds

# seconds before a controller counts as idle: one that is known to be down, any other
_SHORT, _LONG = 5.0, 30.0
_WORKLOADS = ("Job", "StatefulSet", "JobSet", "TrainJob", "PyTorchJob")
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
    elif outage := _describe_outage(ctx, "LocalQueue"):
        fix = "an administrator must restore Kueue; the job then continues by itself"
        sentence = f"the queue {queue} admits nothing: {outage.replace('LocalQueue', 'Kueue')}"
        commands = (_describe(ctx, "LocalQueue"), *commands)
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
    """The API server rejects more pods than the job needs: what ails those that exist is something
    else.
    """
    enough = ctx.status.nodes.min <= ctx.here < ctx.status.nodes.max
    return _diagnose_rejection(ctx) if enough else None


def _diagnose_rejection(ctx: DiagnosticContext) -> Diagnosis | None:
    event = _find_rejection(ctx)
    if event is None:
        return None
    for pattern, explain in _REJECTIONS:
        if found := re.search(pattern, event.message, re.DOTALL):
            return explain(ctx, event, found)
    return _diagnose(
        ctx,
        event,
        "pods-refused",
        f"pods cannot be created: {clip(event.message, 200)}",
        "see the message",
    )


def _find_rejection(ctx: DiagnosticContext) -> KubernetesEvent | None:
    """The latest rejection, unless pods were created after it or none is missing."""
    if (
        not ctx.stuck
        and not any(pod.over for pod in ctx.pods)
        and ctx.status.nodes.ready >= ctx.status.nodes.max
    ):
        return None
    if ctx.status.phase.terminal:
        return None
    event = next(
        (
            each
            for each in ctx.events
            if each.kind in _WORKLOADS and each.reason in _REJECTED and not each.lags
        ),
        None,
    )
    made = next(
        (each.at for each in ctx.events if each.kind in _WORKLOADS and each.reason in _CREATED), 0.0
    )
    alive = sum(not pod.over for pod in ctx.pods)
    return (
        event if event is not None and (event.at >= made or alive < ctx.status.nodes.min) else None
    )


Explain = Callable[[DiagnosticContext, KubernetesEvent, re.Match[str]], Diagnosis]


def _diagnose(
    ctx: DiagnosticContext,
    event: KubernetesEvent,
    cause: str,
    sentence: str,
    fix: str,
    *commands: str,
) -> Diagnosis:
    return Diagnosis(
        cause,
        sentence,
        evidence=(str(event),),
        fix=fix,
        commands=commands or (ctx.kdist("events"),),
    )


def _quota(ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]) -> Diagnosis:
    amounts = re.search(r"requested: ([^:]+?), used: ([^:]+?), limited: (.+?)$", event.message)
    detail = (
        f": asks for {amounts[1]}, {amounts[2]} in use, the limit is {amounts[3]}"
        if amounts
        else ""
    )
    fix = (
        "request less in spec.resources or spec.nodes, end other jobs in the namespace, "
        "or have the quota raised"
    )
    return _diagnose(
        ctx,
        event,
        "quota",
        f"the quota {found[1]} of the namespace is used up{detail}",
        fix,
        ctx.kubectl("describe", "resourcequota", found[1]),
    )


def _quota_field(ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]) -> Diagnosis:
    fix = (
        "name it for every container: spec.resources, or spec.podTemplate for what you added "
        f"({found[2].strip()})"
    )
    return _diagnose(
        ctx,
        event,
        "quota",
        f"the quota {found[1]} requires every pod to specify its resources",
        fix,
        ctx.kubectl("describe", "resourcequota", found[1]),
    )


def _limit_range(ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]) -> Diagnosis:
    sentence = f"a LimitRange of the namespace rejects the pods: {clip(found[0], 200)}"
    return _diagnose(
        ctx,
        event,
        "limit-range",
        sentence,
        "bring spec.resources within the limits",
        ctx.kubectl("describe", "limitrange"),
    )


def _pod_security(
    ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = (
        f"Pod Security level {found[1]} of the namespace rejects the pods: {clip(found[2], 300)}"
    )
    fix = (
        "what kdist renders passes `restricted`: remove from spec.podTemplate what it "
        "complains about"
    )
    return _diagnose(
        ctx,
        event,
        "pod-security",
        sentence,
        fix,
        f"kubectl get namespace {ctx.namespace} --show-labels",
    )


def _webhook_refused(
    ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = f"the admission webhook {found[1]} rejects the pods: {clip(found[2], 300)}"
    return _diagnose(
        ctx,
        event,
        "webhook-refused",
        sentence,
        "change what it complains about, or ask whoever runs the webhook",
    )


def _webhook_away(
    ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    home = operators.find_webhook_home(event.message)
    of = f" of the service {home[0]} in namespace {home[1]}" if home else ""
    sentence = f"the admission webhook {found[1]}{of} does not answer, so nothing can be created"
    fix = "an administrator must restore the webhook's service, or remove its configuration"
    every = "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    commands = (f"kubectl get pods -n {home[1]}", every) if home else (every,)
    return _diagnose(ctx, event, "webhook-away", sentence, fix, *commands)


def _policy(ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]) -> Diagnosis:
    sentence = f"the admission policy {found[1]} rejects the pods: {clip(found[2], 300)}"
    return _diagnose(
        ctx,
        event,
        "policy-refused",
        sentence,
        "change what it complains about, or ask an administrator",
    )


def _service_account(
    ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = f"the service account {found[1]} does not exist"
    own = found[1].rpartition("/")[2] == ctx.name
    fix = (
        "apply the job again: it creates its own"
        if own
        else "create it, or name an existing one in spec.serviceAccountName"
    )
    return _diagnose(
        ctx,
        event,
        "no-service-account",
        sentence,
        fix,
        f"kdist apply JOB.yaml -n {ctx.namespace}",
    )


def _priority_class(
    ctx: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = f"there is no PriorityClass {found[1]}"
    return _diagnose(
        ctx,
        event,
        "no-priority-class",
        sentence,
        "set spec.priorityClass to one that exists",
        "kubectl get priorityclasses",
    )


_REJECTIONS: tuple[tuple[str, Explain], ...] = (
    (r"exceeded quota: ([^,\s]+)", _quota),
    (r"failed quota: ([^:\s]+): must specify ([^;]+)", _quota_field),
    (r'violates PodSecurity "([^"]+)": (.+)', _pod_security),
    (r'admission webhook "([^"]+)" denied the request: ?(.*)', _webhook_refused),
    (r'failed calling webhook "([^"]+)"', _webhook_away),
    (r"ValidatingAdmissionPolicy '([^']+)'[^:]*denied request: ?(.*)", _policy),
    (r"error looking up service account (\S+):", _service_account),
    (r"no PriorityClass with name (\S+) was found", _priority_class),
    (r"(?:maximum|minimum) [\w./-]+ usage per \w+ is .+", _limit_range),
)


def find_idle_operator(ctx: DiagnosticContext) -> Diagnosis | None:
    """The workload has had no pods for a while: its controller does not run, or may not."""
    workload, age = ctx.seen.workload, ctx.status.age
    if (
        not ctx.stuck
        or ctx.pods
        or workload is None
        or age is None
        or ctx.status.phase is Phase.QUEUED
    ):
        return None
    kind = documents.text(workload, "kind")
    touched = bool(documents.items(workload, "status", "conditions"))
    needed = [kind, *(operators.OPERATORS[kind].needs if kind in operators.OPERATORS else ())]
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


def _describe_outage(ctx: DiagnosticContext, kind: str) -> str:
    """A sentence if the controller of a kind is down; empty if it runs, or without permission to
    see it.
    """
    found = (
        operators.find_deployment(ctx.seen.deployments, kind)
        if kind in operators.OPERATORS
        else None
    )
    if found is None:
        return ""
    ready, wanted = operators.count_ready(found)
    place = f"{documents.text(found, 'metadata', 'namespace')}/{documents.name(found)}"
    return (
        ""
        if ready
        else f"the controller of {kind} does not run: 0 of {wanted} replicas of {place} are ready"
    )


def _describe(ctx: DiagnosticContext, kind: str) -> str:
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

"""Why there are no pods: the queue holds the job, or the API server refuses to make them."""

from __future__ import annotations

import re
from collections.abc import Callable

from kdist.backends import operators
from kdist.diagnose.rule import Diagnosis, DiagnosticContext, KubernetesEvent, clip
from kdist.status import Phase, documents
from kdist.units import seconds

# seconds that a controller may take: one that is known to be away, any other
_SHORT, _LONG = 5.0, 30.0
_MAKERS = ("Job", "StatefulSet", "JobSet", "TrainJob", "PyTorchJob")
_REFUSED = ("FailedCreate", "FailedCreatePod", "JobCreationFailed", "SuspendedJobCreationFailed")
_MADE = ("SuccessfulCreate", "SuccessfulCreatePod")


def find_queue(case: DiagnosticContext) -> Diagnosis | None:
    """Kueue has not admitted the job: its own reason."""
    if case.status.phase is not Phase.QUEUED:
        return None
    queue, admission = case.status.queue, case.seen.admission
    reserved = documents.condition(admission, "QuotaReserved")
    evicted = documents.condition(admission, "Evicted")
    said = (
        documents.text(reserved, "message")
        or documents.text(evicted, "message")
        or case.status.message
    )
    evidence = (f"workload/{documents.name(admission)}: {clip(said)}",) if admission else ()
    commands: tuple[str, ...] = (
        case.kubectl("get", "localqueue", queue),
        case.kubectl("get", "workloads.kueue.x-k8s.io"),
    )
    if documents.text(reserved, "reason") == "Inadmissible" or "doesn't exist" in said:
        return Diagnosis(
            "queue-unusable",
            f"the queue {queue} cannot admit the job: {clip(said, 200)}",
            evidence=evidence,
            fix="set spec.queue to a LocalQueue of this namespace whose ClusterQueue is active",
            commands=(case.kubectl("get", "localqueues"),),
        )
    if documents.text(evicted, "status") == "True":
        why = documents.text(evicted, "reason") or "evicted"
        sentence = (
            f"the queue {queue} has taken the job's place away ({why}); it waits to come in again"
        )
    elif away := _is_away(case, "LocalQueue"):
        fix = "whoever runs the cluster must bring Kueue back: the job goes on by itself then"
        sentence = f"the queue {queue} admits nothing: {away.replace('LocalQueue', 'Kueue')}"
        commands = (_describe(case, "LocalQueue"), *commands)
        return Diagnosis("operator-absent", sentence, evidence=evidence, fix=fix, commands=commands)
    elif admission is None:
        sentence = (
            f"the queue {queue} has not taken notice of the job: Kueue may not run here, or "
            "may not know this kind"
        )
    elif "maximum capacity" in said:
        fix = "ask for less in spec.resources or spec.nodes, or have the queue's quota raised"
        sentence = f"the job asks for more than the queue {queue} ever has: {clip(said, 300)}"
        return Diagnosis("queue-too-small", sentence, evidence=evidence, fix=fix, commands=commands)
    else:
        sentence = f"the queue {queue} has no room for the job yet: {clip(said, 300)}"
    fix = "wait, ask for less, or raise the quota"
    return Diagnosis("queued", sentence, "waiting", evidence, fix, commands)


def find_refusal(case: DiagnosticContext) -> Diagnosis | None:
    """The API server refuses the pods (or the volume, or the Job) that the workload wants to
    make.
    """
    event = _find_refused(case)
    if event is None:
        return None
    for pattern, explain in _REFUSALS:
        if found := re.search(pattern, event.message, re.DOTALL):
            return explain(case, event, found)
    return _say(
        case,
        event,
        "pods-refused",
        f"pods cannot be made: {clip(event.message, 200)}",
        "see what the message asks for",
    )


def _find_refused(case: DiagnosticContext) -> KubernetesEvent | None:
    """The latest refusal, unless pods were made after it or all are there."""
    if (
        not case.stuck
        and not any(pod.over for pod in case.pods)
        and case.status.nodes.ready >= case.status.nodes.max
    ):
        return None
    if case.status.phase.terminal:
        return None
    event = next(
        (each for each in case.events if each.kind in _MAKERS and each.reason in _REFUSED), None
    )
    made = next(
        (each.at for each in case.events if each.kind in _MAKERS and each.reason in _MADE), 0.0
    )
    alive = sum(not pod.over for pod in case.pods)
    return (
        event if event is not None and (event.at >= made or alive < case.status.nodes.min) else None
    )


Explain = Callable[[DiagnosticContext, KubernetesEvent, re.Match[str]], Diagnosis]


def _say(
    case: DiagnosticContext,
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
        commands=commands or (case.kdist("events"),),
    )


def _quota(case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]) -> Diagnosis:
    amounts = re.search(r"requested: ([^:]+?), used: ([^:]+?), limited: (.+?)$", event.message)
    detail = (
        f": asks for {amounts[1]}, {amounts[2]} in use, the limit is {amounts[3]}"
        if amounts
        else ""
    )
    fix = (
        "ask for less in spec.resources or spec.nodes, end something else in the namespace, "
        "or have the quota raised"
    )
    return _say(
        case,
        event,
        "quota",
        f"the quota {found[1]} of the namespace is used up{detail}",
        fix,
        case.kubectl("describe", "resourcequota", found[1]),
    )


def _quota_field(
    case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    fix = (
        "name it for every container: spec.resources, or spec.podTemplate for what you added "
        f"({found[2].strip()})"
    )
    return _say(
        case,
        event,
        "quota",
        f"the quota {found[1]} wants every pod to say how much it takes",
        fix,
        case.kubectl("describe", "resourcequota", found[1]),
    )


def _limit_range(
    case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = f"a LimitRange of the namespace refuses the pods: {clip(found[0], 200)}"
    return _say(
        case,
        event,
        "limit-range",
        sentence,
        "bring spec.resources within the limits",
        case.kubectl("describe", "limitrange"),
    )


def _pod_security(
    case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = (
        f"Pod Security level {found[1]} of the namespace refuses the pods: {clip(found[2], 300)}"
    )
    fix = (
        "what kdist renders passes `restricted`: take out of spec.podTemplate what it "
        "complains about"
    )
    return _say(
        case,
        event,
        "pod-security",
        sentence,
        fix,
        f"kubectl get namespace {case.namespace} --show-labels",
    )


def _webhook_refused(
    case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = f"the admission webhook {found[1]} refuses the pods: {clip(found[2], 300)}"
    return _say(
        case,
        event,
        "webhook-refused",
        sentence,
        "change what it complains about, or ask whoever runs the webhook",
    )


def _webhook_away(
    case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    home = operators.find_webhook_home(event.message)
    of = f" of the service {home[0]} in namespace {home[1]}" if home else ""
    sentence = f"the admission webhook {found[1]}{of} does not answer, so nothing can be made"
    fix = (
        "whoever runs the cluster must bring the webhook's service back, or remove its "
        "configuration"
    )
    every = "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
    commands = (f"kubectl get pods -n {home[1]}", every) if home else (every,)
    return _say(case, event, "webhook-away", sentence, fix, *commands)


def _policy(case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]) -> Diagnosis:
    sentence = f"the admission policy {found[1]} refuses the pods: {clip(found[2], 300)}"
    return _say(
        case,
        event,
        "policy-refused",
        sentence,
        "change what it complains about, or ask whoever runs the cluster",
    )


def _service_account(
    case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = f"the service account {found[1]} does not exist"
    own = found[1].rpartition("/")[2] == case.name
    fix = (
        "send the job again: it makes its own"
        if own
        else "make it, or name one that exists in spec.serviceAccountName"
    )
    return _say(
        case,
        event,
        "no-service-account",
        sentence,
        fix,
        f"kdist apply JOB.yaml -n {case.namespace}",
    )


def _priority_class(
    case: DiagnosticContext, event: KubernetesEvent, found: re.Match[str]
) -> Diagnosis:
    sentence = f"there is no PriorityClass {found[1]}"
    return _say(
        case,
        event,
        "no-priority-class",
        sentence,
        "set spec.priorityClass to one that exists",
        "kubectl get priorityclasses",
    )


_REFUSALS: tuple[tuple[str, Explain], ...] = (
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


def find_idle_operator(case: DiagnosticContext) -> Diagnosis | None:
    """Nothing has touched the workload for a while: what makes pods of it does not run, or may not
    run.
    """
    workload, age = case.seen.workload, case.status.age
    if (
        not case.stuck
        or case.pods
        or workload is None
        or age is None
        or case.status.phase is Phase.QUEUED
    ):
        return None
    kind = documents.text(workload, "kind")
    touched = bool(documents.items(workload, "status", "conditions"))
    needed = [kind, *(operators.OPERATORS[kind].needs if kind in operators.OPERATORS else ())]
    away = [words for each in needed if (words := _is_away(case, each))]
    if age < (_SHORT if away else _LONG) or (touched and not away):
        return None
    names = [
        f"*{operators.OPERATORS[each].part}*" for each in needed if each in operators.OPERATORS
    ]
    called = f" (a deployment called {' and '.join(names)})" if names else ""
    why = "; ".join(away) or f"its controller{called} may not run"
    return Diagnosis(
        "operator-absent",
        f"nobody has made pods of the {kind} for {seconds(age)}: {why}",
        evidence=(f"{kind.lower()}/{case.name}: {'no news' if touched else 'no status'}, no pods",),
        fix=(
            f"whoever runs the cluster must bring the controller of {kind} back: the job goes "
            "on by itself then"
        ),
        commands=(
            *(_describe(case, each) for each in needed if _is_away(case, each)),
            case.kubectl("get", kind.lower(), case.name, "-o", "yaml"),
            "kdist doctor",
        ),
    )


def _is_away(case: DiagnosticContext, kind: str) -> str:
    """That the controller behind a kind does not run; empty where it does, or where we may not
    know.
    """
    found = (
        operators.find_deployment(case.seen.deployments, kind)
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


def _describe(case: DiagnosticContext, kind: str) -> str:
    found = operators.find_deployment(case.seen.deployments, kind)
    return (
        f"kubectl describe deployment {documents.name(found)} -n "
        f"{documents.text(found, 'metadata', 'namespace')}"
    )

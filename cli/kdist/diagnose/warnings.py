"""What Kubernetes says of a job that no other rule knows: events of type Warning, and the messages
of pods and of the workload. They are shown as they are.
"""

from __future__ import annotations

from typing import Final

from kdist.diagnose.rule import Diagnosis, DiagnosticContext, KubernetesEvent, clip
from kdist.status import Phase, Pod, documents

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
        if not pod.over or not refused or _has_run(ctx, pod) or past:
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


def _has_run(ctx: DiagnosticContext, pod: Pod) -> bool:
    return bool(documents.items(ctx.document(pod), "status", "containerStatuses")) and (
        pod.ended is not None or pod.before is not None
    )


def _message(ctx: DiagnosticContext, pod: Pod) -> str:
    return pod.message or documents.text(ctx.document(pod), "status", "message")


def find_warning(ctx: DiagnosticContext) -> Diagnosis | None:
    """Something that Kubernetes warns of, or says of a pod or of the workload, and that no other
    rule explains.
    """
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
            (_describe(ctx, event), ctx.kdist("events")),
        )
    return _find_message(ctx)


def _counts(ctx: DiagnosticContext, event: KubernetesEvent, waiting: set[str]) -> bool:
    if (
        not event.warns
        or event.reason.startswith(_HARMLESS)
        or ctx.now - event.at > _WARNING_SECONDS
    ):
        return False
    if event.lags:
        return False
    return event.name in waiting if event.kind == "Pod" else not _is_overcome(ctx, event)


def _is_overcome(ctx: DiagnosticContext, event: KubernetesEvent) -> bool:
    """Whether all pods were made since: what a controller could not do then it has done."""
    made = [pod.created for pod in ctx.pods if not pod.over and pod.created is not None]
    return len(made) >= ctx.status.nodes.min and max(made) >= event.at


def _describe(ctx: DiagnosticContext, event: KubernetesEvent) -> str:
    return ctx.kubectl("describe", event.kind.lower(), event.name)


def _find_message(ctx: DiagnosticContext) -> Diagnosis | None:
    """The message of a pod that does not run, or of the workload."""
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

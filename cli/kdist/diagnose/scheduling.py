"""Why pods are not scheduled: insufficient resources, taints, node selectors, and volume claims
that are missing or pending. Requests are compared as Kubernetes quantities (`500m`, `4Gi`, `2`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kdist.diagnose.rule import (
    Cause,
    Diagnosis,
    DiagnosticContext,
    Severity,
    clip,
    name_all,
    name_pods,
)
from kdist.status import Pod, documents
from kdist.status.documents import Document
from kdist.units import count, number, parse_quantity, size


def show(resource: str, amount: float) -> str:
    """An amount as people write it: `8 cpu`, `4.0 GiB memory`."""
    shown = (
        size(amount) if resource in ("memory", "ephemeral-storage") else number(round(amount, 3))
    )
    return f"{shown.removesuffix('.0')} {resource}"


def requests(pod: Document) -> dict[str, float]:
    """Sum of the requests (or limits) of all containers of a pod, by resource."""
    found: dict[str, float] = {}
    for container in documents.items(pod, "spec", "containers"):
        asked: Mapping[str, object] = {
            **documents.mapping(container, "resources", "limits"),
            **documents.mapping(container, "resources", "requests"),
        }
        for resource, amount in asked.items():
            found[resource] = found.get(resource, 0.0) + (parse_quantity(amount) or 0.0)
    return found


def allocatable(node: Document, resource: str) -> float:
    """Allocatable amount of a resource on a node."""
    return parse_quantity(documents.at(node, "status", "allocatable", resource)) or 0.0


_OBSTACLE = re.compile(
    r"(\d+) (node\(s\) (?:\{[^}]*\}|[^,.{])*|Insufficient [\w./-]*\w|Too many pods)"
)


def _unscheduled(ctx: DiagnosticContext) -> list[Pod]:
    return [pod for pod in ctx.waiting if not pod.scheduled and pod.reason == "Unschedulable"]


def find_claim_trouble(ctx: DiagnosticContext) -> Diagnosis | None:
    """A volume claim does not exist, or is not bound."""
    if not ctx.waiting:
        return None
    for pod in _unscheduled(ctx):
        if found := re.search(r'persistentvolumeclaim "([^"]+)" not found', pod.message):
            return _missing_claim(ctx, found[1], f"pod/{pod.name}: {clip(pod.message)}")
    for name, claim in ctx.seen.claims.items():
        if not claim:
            return _missing_claim(ctx, name, f"{name_pods(ctx.waiting)} mount it")
    return next(filter(None, (_pending_claim(ctx, name) for name in ctx.seen.claims)), None)


def _missing_claim(ctx: DiagnosticContext, name: str, evidence: str) -> Diagnosis:
    return Diagnosis(
        "claim-missing",
        ctx.missing(f"the volume claim {name}"),
        evidence=(evidence,),
        fix="create it (`kdist render JOB.yaml --claims only` prints that of "
        "`checkpoints.size`), name one that exists, or let "
        "`kdist apply` make one with `checkpoints: {size: 10Gi}`",
        commands=(ctx.kubectl("get", "pvc"),),
    )


def _pending_claim(ctx: DiagnosticContext, name: str) -> Diagnosis | None:
    claim = ctx.seen.claims[name]
    events = list(
        ctx.events_of(
            "PersistentVolumeClaim",
            [name],
            "ProvisioningFailed",
            "FailedBinding",
            "VolumeResizeFailed",
        )
    )
    phase = documents.text(claim, "status", "phase")
    if phase == "Lost":
        return _claim(
            ctx,
            "claim-lost",
            f"the volume of claim {name} is gone",
            [f"pvc/{name}: Lost"],
            "restore it, or use another claim",
        )
    waits = any(
        "unbound immediate PersistentVolumeClaims" in pod.message for pod in _unscheduled(ctx)
    )
    if phase != "Pending" or not (events or waits):
        return None
    message = events[0].message if events else ""
    wanted = documents.text(claim, "spec", "storageClassName")
    modes = documents.at(claim, "spec", "accessModes")
    asked = ", ".join(str(mode) for mode in modes) if isinstance(modes, list) else ""
    fix = "choose a class that supports it: `kubectl get storageclass` lists them"
    if "not found" in message and wanted:
        sentence = f"the volume claim {name} requests storage class {wanted}, which does not exist"
    elif "no storage class is set" in message:
        sentence = (
            f"the volume claim {name} names no storage class, there is no default one, and no "
            "volume fits"
        )
        fix = "set checkpoints.class, or create a default storage class"
    elif "ReadWriteMany" in asked:
        sentence = (
            f"the volume claim {name} gets no volume; the class {wanted or 'used'} may not "
            "support ReadWriteMany"
        )
        fix = (
            "choose a class with shared volumes, or checkpoints.accessMode: ReadWriteOnce "
            "for a job of one node"
        )
    else:
        sentence = f"the volume claim {name} has no volume yet"
    evidence = [str(event) for event in events[:2]] or [f"pvc/{name}: Pending"]
    return _claim(ctx, "claim-pending", sentence, evidence, fix)


def _claim(
    ctx: DiagnosticContext, cause: Cause, sentence: str, evidence: Sequence[str], fix: str
) -> Diagnosis:
    name = sentence.split("claim ")[1].split()[0].rstrip(",")
    return Diagnosis(
        cause,
        sentence,
        evidence=tuple(evidence),
        fix=fix,
        commands=(ctx.kubectl("describe", "pvc", name),),
    )


def find_unschedulable(ctx: DiagnosticContext) -> Diagnosis | None:
    """No node fits a pod: which resource is short, and what the nodes have."""
    pods = _unscheduled(ctx)
    if not pods:
        return None
    message = next((pod.message for pod in pods if pod.message), "")
    obstacles = [
        (int(number), what.strip())
        for number, what in _OBSTACLE.findall(message.split("preemption:")[0])
    ]
    short = [
        what.removeprefix("Insufficient ")
        for _, what in obstacles
        if what.startswith("Insufficient ")
    ]
    evidence = [f"pod/{pods[0].name}: {clip(message)}"]
    who = f"{name_pods(pods)} {'find' if len(pods) > 1 else 'finds'} no node"
    if ctx.status.avoided and _REFUSED in message:
        what, fix, allow = _describe_avoided(ctx)
        more = f"wait, add a node, or {fix}"
        return Diagnosis("nodes-avoided", f"{who}: {what}", "blocked", (*evidence,), more, allow)
    if short:
        wanted = requests(ctx.document(pods[0]))
        nodes = ctx.seen.nodes

        def fits(resource: str) -> bool:
            least = wanted.get(resource, 0.0)
            return any(allocatable(node, resource) >= least for node in nodes.values())

        resource = next((each for each in short if not fits(each)), short[0])
        asked = show(resource, wanted[resource]) if resource in wanted else resource
        amounts = {name: allocatable(node, resource) for name, node in nodes.items()}
        largest = max(amounts.values(), default=None)
        if nodes:
            have = [f"{name} {show(resource, amount)}" for name, amount in amounts.items()]
            others = f" and {len(have) - 8} more nodes" if len(have) > 8 else ""
            evidence.append(f"allocatable in all: {', '.join(have[:8])}{others}")
        if largest is not None and resource in wanted and largest < wanted[resource]:
            offers = f"no node has any {resource}"
            if largest:
                offers = f"the largest node has {show(resource, largest)}"
            sentence = f"{who}: each requests {asked}, {offers}"
            fix = f"request less {resource} in spec.resources, or add a larger node"
        else:
            sentence = f"{who}: each requests {asked}, and the nodes that could give it are full"
            fix = (
                f"wait until something ends, request less {resource} in spec.resources, use fewer "
                "nodes, or add one"
            )
        severity: Severity = (
            "blocked" if largest is not None and largest < wanted.get(resource, 0.0) else "waiting"
        )
        commands = ("kubectl describe nodes", ctx.kubectl("describe", "pod", pods[0].name))
        return Diagnosis("unschedulable", sentence, severity, tuple(evidence), fix, commands)
    reasons = _rank_obstacles(ctx, pods[0], obstacles or [(0, message)])
    words = (
        "; ".join(each for each, _ in reasons)
        or clip(message, 200)
        or "the scheduler does not say why"
    )
    if ctx.seen.nodes:
        taints = sorted({_taint(each) for each in _taints(ctx)})
        evidence += (
            [f"taints of the nodes: {name_all(taints)}"] if taints and "taint" in message else []
        )
        evidence += [f"{count(len(ctx.seen.nodes), 'node')}: {name_all(list(ctx.seen.nodes))}"]
    commands = (ctx.kubectl("describe", "pod", pods[0].name), "kubectl get nodes --show-labels")
    return Diagnosis(
        "unschedulable",
        f"{who}: {words}",
        evidence=tuple(evidence),
        fix="; ".join(fix for _, fix in reasons)
        or "see the scheduler's events of the pod, and the nodes",
        commands=commands,
    )


_REFUSED = "didn't match pod anti-affinity rules"


def _describe_avoided(ctx: DiagnosticContext) -> tuple[str, str, tuple[str, ...]]:
    """Which nodes the job's pods stay away from, how to let them use these again, and with what."""
    commands = tuple(ctx.kdist("recover", "--allow", each.node) for each in ctx.status.avoided)
    what = f"the job avoids {'; '.join(map(str, ctx.status.avoided))}"
    return what, "let its pods use a node again", commands


def find_avoided_nodes(ctx: DiagnosticContext) -> Diagnosis | None:
    """The job's pods stay away from a node."""
    is_known = any(_REFUSED in pod.message for pod in _unscheduled(ctx))
    if not ctx.status.avoided or is_known or ctx.status.phase.terminal:
        return None
    what, fix, commands = _describe_avoided(ctx)
    return Diagnosis("avoids", what, "fine", (), fix, commands)


_CONSTRAINTS: tuple[tuple[str, str, str], ...] = (
    ("unreachable", "nodes are not reachable", "bring the nodes back, or add others"),
    ("not-ready", "nodes are not ready", "bring the nodes back, or add others"),
    (
        "taint",
        "nodes have taints that the job does not tolerate",
        "add the taint to spec.tolerations, or use nodes without it",
    ),
    (
        "pod anti-affinity",
        "nodes hold a pod that this one must not share a node with (pod anti-affinity)",
        "add a node, use fewer (spec.nodes), or change the affinity in spec.podTemplate",
    ),
    (
        "affinity/selector",
        "no node has the labels of spec.nodeSelector",
        "change spec.nodeSelector, or label nodes",
    ),
    (
        "volume node affinity",
        "the volume is on a node, or in a zone, that cannot take the pod",
        "use a volume that all nodes can mount",
    ),
    (
        "available persistent volumes",
        "no volume fits the job's claim on any node",
        "create a volume, or choose another class",
    ),
    ("unschedulable", "nodes are cordoned", "uncordon one: kubectl uncordon NODE"),
    ("Too many pods", "the nodes are full of pods", "wait, or add a node"),
    (
        "free ports",
        "a host port of the pod is taken on every node",
        "remove the host port from spec.podTemplate",
    ),
)


_SELECTOR = "affinity/selector"
_EVERY_CLUSTER = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


def _rank_obstacles(
    ctx: DiagnosticContext, pod: Pod, obstacles: Sequence[tuple[int, str]]
) -> list[tuple[str, str]]:
    """Sentence and fix of the two most relevant obstacles.

    The scheduler names one obstacle per node, taints first. A control plane's taint is in every
    cluster, and a selector that no node at all satisfies decides whatever the taints are.
    """
    selector = documents.mapping(ctx.document(pod), "spec", "nodeSelector")
    ranked: dict[str, tuple[tuple[bool, int], str, str]] = {}
    for nodes, message in obstacles:
        for key, words, fix in _CONSTRAINTS:
            if key not in message:
                continue
            named = ", ".join(f"{name}={value}" for name, value in selector.items())
            sentence = f"{words} ({named})" if key == _SELECTOR and named else words
            late = key == "taint" and _is_control_plane(ctx, message)
            ranked[key] = ((late, -nodes), sentence, fix)
            break
    if _SELECTOR in ranked and ctx.seen.nodes and selector:
        labels = [documents.mapping(each, "metadata", "labels") for each in ctx.seen.nodes.values()]
        if any(
            selector.items() <= each.items() for each in labels
        ):  # it is the obstacle of the other nodes only
            words = "the others lack the labels of spec.nodeSelector"
            ranked[_SELECTOR] = ((True, 1), words, ranked[_SELECTOR][2])
        else:
            ranked = {_SELECTOR: ranked[_SELECTOR]}
    return [(words, fix) for _, words, fix in sorted(ranked.values(), key=lambda each: each[0])][:2]


def _is_control_plane(ctx: DiagnosticContext, message: str) -> bool:
    """Whether the taints that were met are those of control planes alone, as far as is known."""
    named = re.search(r"\{([^:=}]+)", message)
    keys = {named[1]} if named else {documents.text(each, "key") for each in _taints(ctx)}
    return bool(keys) and keys <= set(_EVERY_CLUSTER)


def _taints(ctx: DiagnosticContext) -> list[documents.Document]:
    nodes = ctx.seen.nodes.values()
    return [each for node in nodes for each in documents.items(node, "spec", "taints")]


def _taint(taint: documents.Document) -> str:
    value = documents.text(taint, "value")
    effect = documents.text(taint, "effect")
    return f"{documents.text(taint, 'key')}{'=' + value if value else ''}:{effect}"

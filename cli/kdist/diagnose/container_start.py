"""Why a container does not start: volumes that cannot be mounted, images, missing Secrets and
ConfigMaps, wrong commands, and what cannot be downloaded or is larger than its volume.
"""

from __future__ import annotations

import re
from typing import Final

from kdist.diagnose.rule import Cause, Diagnosis, DiagnosticContext, Severity, clip, name_pods
from kdist.status import FETCHED, ContainerTermination, InitContainer, Phase, Pod, documents
from kdist.status.pods import CONFIG_FAILURES, PULL_FAILURES, describe_fetching, find_slowest
from kdist.units import seconds

_NO_KEY = r"couldn't find key (\S+) in (Secret|ConfigMap) \S*?/?([^/\s]+)$"
_SLOW_PULL = 60.0  # seconds of pulling that are reported
_UNHEARD = "not registered"
ABSENT_SOURCE = re.compile(
    r'(secret|configmap) "([^"]+)" not found'
    r"|references non-existent (secret|config) key: (\S+)"
)


def find_mount_trouble(ctx: DiagnosticContext) -> Diagnosis | None:
    """A volume cannot be mounted. Slow pulls and waiting containers are only consequences."""
    # Images are pulled and containers created once all volumes are mounted: for a pod that fails
    # there, or whose container has run, the event is about a mount that has succeeded since.
    pods = [pod for pod in ctx.waiting if pod.scheduled and not (pod.troubled or pod.has_run)]
    reasons = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
    told = ctx.events_of("Pod", [pod.name for pod in pods], *reasons)
    event = next((each for each in told if not (each.lags or _may_exist(ctx, each.message))), None)
    if event is None:
        return None
    node = next((each.node for each in ctx.pods if each.name == event.name), "")
    sentence, fix = _explain_mount(event.name, event.message)
    return Diagnosis(
        "mount",
        sentence,
        evidence=(str(event), *([f"{event.name} is on node {node}"] if node else [])),
        fix=fix,
        commands=(ctx.kubectl("describe", "pod", event.name),),
    )


def _may_exist(ctx: DiagnosticContext, message: str) -> bool:
    """Whether the ConfigMap that the kubelet did not find exists, or it has only not heard of it
    yet: it tries again.
    """
    if _UNHEARD in message:
        return True
    found = ABSENT_SOURCE.search(message)
    return found is not None and found[1] == "configmap" and found[2] in ctx.seen.config_maps


def _explain_mount(pod: str, message: str) -> tuple[str, str]:
    """What the kubelet's message about a volume means, and the fix."""
    volume = re.search(r'for volume "([^"]+)"', message) or re.search(
        r"unmounted volumes=\[([^\]]*)\]", message
    )
    name = volume[1] if volume else "?"
    if found := ABSENT_SOURCE.search(message):
        kind = "Secret" if (found[1] or found[3]) == "secret" else "ConfigMap"
        what = f"{kind} {found[2]}" if found[2] else f"key {found[4]} of a {kind}"
        return f"{what} does not exist, which the volume {name} uses", "create it"
    if "Multi-Attach" in message or "already exclusively attached" in message:
        return (
            f"the volume {name} is attached to another node and can be on one only",
            "use a claim with accessMode ReadWriteMany, or nodes: 1; a deleted pod releases "
            "it after some minutes",
        )
    driver = r"driver name (\S+) not found in the list of registered CSI drivers"
    if found := re.search(driver, message):
        return (
            f"the node lacks the storage driver {found[1]} of the volume {name}",
            "an administrator must restore it on that node",
        )
    detail = re.search(r"(?:mount failed|rpc error|Output|mount\.nfs)[^\n]*", message)
    reason = clip(detail[0] if detail else message, 200)
    return (
        f"the volume {name} of {pod} cannot be mounted: {reason}",
        "check whether the storage responds from that node",
    )


# (pattern in the message, cause, sentence, fix); the first match counts.
_Answer = tuple[str, Cause, str, str]
_PULL_CAUSES: tuple[_Answer, ...] = (
    (
        r"invalid reference format|InvalidImageName|couldn't parse image",
        "image-name",
        "is not a valid image name",
        "correct spec.image",
    ),
    (
        r"no match for platform|no matching manifest",
        "image-platform",
        "is not built for the nodes' CPU architecture",
        "build it for them",
    ),
    (
        r"no such host|server misbehaving",
        "image-registry",
        "cannot be pulled: its registry's host name cannot be resolved",
        "correct the host in spec.image, or check the nodes' DNS",
    ),
    (
        r"401 Unauthorized|unauthorized|authentication required|no basic auth|403 Forbidden"
        r"|insufficient_scope",
        "image-auth",
        "cannot be pulled: the registry requires authentication, or has no such repository",
        "create a registry Secret, name it in spec.imagePullSecrets, and check the name for a typo",
    ),
    (
        r"pull access denied|repository does not exist|manifest unknown|: not found|NotFound"
        r"|name unknown",
        "image-missing",
        "does not exist: a typo, or the tag was never pushed",
        "correct spec.image, or push the image",
    ),
    (
        r"x509|certificate",
        "image-tls",
        "cannot be pulled: the nodes do not trust the registry's certificate",
        "have the nodes trust it",
    ),
    (
        r"server gave HTTP response to HTTPS",
        "image-tls",
        "cannot be pulled: the registry uses plain HTTP, which the nodes reject",
        "have the nodes allow it, or give the registry TLS",
    ),
    (
        r"toomanyrequests|429",
        "image-limit",
        "cannot be pulled: the registry's limit is reached",
        "log in to the registry, or use a mirror",
    ),
    (
        r"no space left",
        "image-disk",
        "does not fit on the node's disk",
        "free space on the node, or use a smaller image",
    ),
    (
        r"i/o timeout|connection refused|timed? ?out|unreachable|EOF|reset by peer",
        "image-registry",
        "cannot be pulled: its registry does not answer",
        "check whether the nodes reach the registry",
    ),
    (
        r"ErrImageNeverPull|is not present with pull policy",
        "image-missing",
        "is not on the node, and must not be pulled",
        "load it there",
    ),
)


def find_image_trouble(ctx: DiagnosticContext) -> Diagnosis | None:
    """The image cannot be pulled: wrong name, registry unreachable, or no access."""
    pods = [pod for pod in ctx.waiting if pod.reason in PULL_FAILURES]
    if not pods:
        return None
    names = [pod.name for pod in pods]
    told = ctx.events_of("Pod", names, "Failed", "ErrImagePull", "InspectFailed")
    failed = next((each for each in told if re.search("pull|image", each.message.lower())), None)
    message = f"{pods[0].reason}: {pods[0].message} {failed.message if failed else ''}"
    general: _Answer = ("", "image", "cannot be pulled", "see the registry's message")
    matching = (each for each in _PULL_CAUSES if re.search(each[0], message))
    _, cause, words, fix = next(matching, general)
    return Diagnosis(
        cause,
        f"the image {_image_of(ctx, pods[0])} {words}",
        evidence=(
            f"pod/{pods[0].name}: {pods[0].reason}: {clip(pods[0].message)}",
            *([str(failed)] if failed else []),
            f"waiting: {name_pods(pods)}",
        ),
        fix=fix,
        commands=(ctx.kubectl("describe", "pod", pods[0].name),),
    )


def _image_of(ctx: DiagnosticContext, pod: Pod) -> str:
    document = ctx.document(pod)
    images = {
        documents.text(each, "name"): documents.text(each, "image")
        for each in documents.items(document, "spec", "containers")
    }
    for status in documents.items(document, "status", "containerStatuses"):
        if documents.text(status, "state", "waiting", "reason") == pod.reason:
            return images.get(documents.text(status, "name"), "") or documents.text(status, "image")
    return images.get(pod.container, "") or "?"


def find_config_trouble(ctx: DiagnosticContext) -> Diagnosis | None:
    """A Secret, a ConfigMap or one of its keys is missing, or the image's user is not allowed."""
    pod = next((pod for pod in ctx.waiting if pod.reason in CONFIG_FAILURES), None)
    if pod is None:
        return None
    message = pod.message
    fix = "see the message"
    if found := re.search(r'(secret|configmap) "([^"]+)" not found', message):
        kind = "Secret" if found[1] == "secret" else "ConfigMap"
        cause: Cause = "secret-missing" if kind == "Secret" else "configmap-missing"
        sentence = ctx.missing(f"{kind} {found[2]}")
        create = "secret generic" if kind == "Secret" else "configmap"
        fix = f"create it: kubectl create {create} {found[2]} … -n {ctx.namespace}"
    elif found := re.search(_NO_KEY, message):
        cause = "secret-missing" if found[2] == "Secret" else "configmap-missing"
        sentence = f"{found[2]} {found[3]} has no key {found[1]}"
        fix = "add the key, or correct spec.env"
    elif "runAsNonRoot" in message or "non-numeric user" in message:
        cause = "image-user"
        what = "the image wants to run as root, or as a user without a number"
        sentence = f"{what}: {clip(message, 200)}"
        fix = "give the image a numeric USER other than 0"
    else:
        cause = "container"
        sentence = f"the container of {pod.name} cannot be created: {clip(message, 200)}"
    return Diagnosis(
        cause,
        sentence,
        evidence=(f"pod/{pod.name}: {pod.reason}: {clip(message)}",),
        fix=fix,
        commands=(ctx.kubectl("describe", "pod", pod.name),),
    )


def find_start_trouble(ctx: DiagnosticContext) -> Diagnosis | None:
    """The image lacks the program to start."""
    over = ctx.status.phase is Phase.FAILED
    for pod in ctx.pods:
        if pod.running or (not over and ctx.is_replaced(pod)):
            continue  # it has started since, or another one in its place
        end = pod.ended or pod.before
        reasons = {pod.reason, end.reason if end else ""}
        message = f"{pod.message} {end.message if end else ''}"
        if reasons & {"RunContainerError", "StartError", "ContainerCannotRun"} or (
            end and end.code in (126, 127) and not end.record
        ):
            return Diagnosis(
                "container-start",
                f"the container of {pod.name} cannot be started: "
                f"{clip(message, 200) or 'its command is not in the image'}",
                evidence=(f"pod/{pod.name}: {clip(message)}",),
                fix="build the image on kdist's own, whose entrypoint starts the trainer",
                commands=(
                    ctx.kdist("logs", "--previous"),
                    ctx.kubectl("describe", "pod", pod.name),
                ),
            )
    return None


def find_slow_pull(ctx: DiagnosticContext) -> Diagnosis | None:
    """The image is still being pulled."""
    for pod in ctx.waiting:
        latest = next(ctx.events_of("Pod", [pod.name], "Pulling", "Pulled", "Created"), None)
        if not pod.scheduled or pod.troubled or latest is None or latest.reason != "Pulling":
            continue
        if (took := ctx.now - latest.at) >= _SLOW_PULL:
            return Diagnosis(
                "slow-pull",
                f"{pod.name} has been pulling the image {_image_of(ctx, pod)} for {seconds(took)}",
                "waiting",
                (str(latest),),
                "wait: a node pulls an image once; torch's takes minutes on a slow connection",
                (ctx.kdist("events"),),
            )
    return None


_FIRST_SIGNAL: Final = 128  # exit codes from here on are those of signals
_NO_MODULE = re.compile(r"No module named|unrecognized arguments|invalid choice")
_OVER_LIMIT = re.compile(rf'EmptyDir volume "({"|".join(FETCHED)})-?(\d*)" exceeds')


def find_fetch_trouble(ctx: DiagnosticContext) -> Diagnosis | None:
    """An init container that fetches has failed: for good, or so that it is tried again."""
    hit = [pod for pod in ctx.pods if pod.init and pod.init.fetches and _tells_why(pod.init)]
    if not hit or not (ctx.stuck or ctx.status.phase is Phase.FAILED):
        return None
    pod = next((pod for pod in hit if pod.init and pod.init.failed_permanently), hit[0])
    init, end = pod.init, pod.init.failure if pod.init else None
    if init is None or end is None:
        return None
    failed = ctx.status.phase is Phase.FAILED
    severity: Severity = "failed" if failed else "blocked" if init.failed_permanently else "waiting"
    words = "could not be fetched, it is tried again"
    if init.failed_permanently:
        words = "cannot be fetched"
    restarts = f", restarted {init.restarts} times" if init.restarts else ""
    evidence = [f"pod/{pod.name}: {init.name} ended with exit code {end.code}{restarts}"]
    if end.record is not None:
        evidence.append(f"exit record: cause {end.record.cause}, code {end.record.code}")
    reason, fix = _explain(init, end)
    commands, change = [ctx.kdist("logs", "-c", init.name, "--pod", pod.name)], ""
    if failed:
        again, change = ctx.start_again(end.record)
        commands.append(again)
    return Diagnosis(
        "fetch",
        f"{init.subject} {words}: {reason}",
        severity,
        tuple(evidence),
        fix,
        tuple(commands),
        change,
    )


def _tells_why(init: InitContainer) -> bool:
    """Whether it failed by itself: one that was killed from outside, as in an eviction, did not."""
    end = init.failure
    return end is not None and (
        end.record is not None or end.reason == "OOMKilled" or end.code < _FIRST_SIGNAL
    )


def _explain(init: InitContainer, end: ContainerTermination) -> tuple[str, str]:
    """Why a fetch failed, and the fix."""
    field = init.field or "the field with the url"
    if end.record is not None:
        fix = {
            "config": f"correct {field}, then apply and restart",
            "data": f"correct {field}, or what is at its URL, then apply and restart",
        }.get(end.record.cause, "check whether the server answers from the pods' network")
        return clip(end.record.message, 400) or f"exit code {end.code}", fix
    if end.reason == "OOMKilled":
        return "it used more memory than the limit and was killed", "raise spec.resources.memory"
    if end.code in (1, 2) or _NO_MODULE.search(end.message):
        return (
            f"it ended with exit code {end.code} and left no exit record",
            "see its log; without `kdist_trainer.fetch` in it the image has an older trainer: "
            "rebuild the image, and set spec.image",
        )
    return f"it ended with exit code {end.code} and left no exit record", "see its log"


def find_fetching(ctx: DiagnosticContext) -> Diagnosis | None:
    """Pods fetch data or weights, and nothing is wrong so far."""
    pods = [pod for pod in ctx.pods if not pod.over]
    words = describe_fetching(pods)
    if not ctx.stuck or not words:
        return None
    progress = find_slowest(pods)
    amount = f": {progress}" if progress is not None else ""
    first = next(pod for pod in pods if pod.fetching)
    what = "starts again" if ctx.status.phase is Phase.RECOVERING else "starts"
    name = first.init.name if first.init else ""
    return Diagnosis(
        "fetching",
        f"{ctx.name} {what}: {words}{amount}",
        "waiting",
        tuple(f"pod/{pod.name}: {pod.state}" for pod in pods)[:8],
        "wait until it is fetched",
        (ctx.kdist("logs", "-f", "-c", name), ctx.kdist("status", "-w")),
    )


def advise_on_size(message: str) -> str:
    """The fix for a pod that was evicted because it fetched too much; empty for any other one."""
    found = _OVER_LIMIT.search(message)
    if found is None:
        return ""
    field = FETCHED[found[1]][0].format(found[2])
    return f"raise {field}.size: it limits what the files take up on the node's disk"

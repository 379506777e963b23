"""Data and weights that a job fetches by URL before it trains: they cannot be fetched, or they are
being fetched.
"""

from __future__ import annotations

import re
from typing import Final

from kdist.diagnose.rule import Diagnosis, DiagnosticContext, Severity, clip
from kdist.status import ContainerTermination, InitContainer, Phase, Pod
from kdist.status.fetching import describe_fetching, find_slowest

FETCH: Final = "fetch"
"""The cause that something cannot be fetched."""
_FIRST_SIGNAL: Final = 128  # exit codes from here on are those of signals
_NO_MODULE = re.compile(r"No module named|unrecognized arguments|invalid choice")
_OVER_LIMIT = re.compile(r'EmptyDir volume "(?:data-(\d+)|(init))" exceeds')


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
    words = (
        "cannot be fetched"
        if init.failed_permanently
        else "could not be fetched, it is tried again"
    )
    reason, fix = _explain(init, end)
    commands, change = [ctx.kdist("logs", "-c", init.name, "--pod", pod.name)], ""
    if failed:
        again, change = ctx.start_again(end.record)
        commands.append(again)
    return Diagnosis(
        FETCH,
        f"{init.what} {words}: {reason}",
        severity,
        _list_evidence(pod, init, end),
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
        fixes = {
            "config": f"correct {field}, then apply and restart",
            "data": f"correct {field}, or what is at its URL, then apply and restart",
        }
        words = clip(end.record.message, 400) or f"exit code {end.code}"
        return words, fixes.get(
            end.record.cause, "check whether the server answers from the pods' network"
        )
    if end.reason == "OOMKilled":
        return "it used more memory than the limit and was killed", "raise spec.resources.memory"
    if end.code in (1, 2) or _NO_MODULE.search(end.message):
        return (
            f"it ended with exit code {end.code} and left no exit record",
            "see its log; without `kdist_trainer.fetch` in it the image has an older trainer: "
            "rebuild the image, and set spec.image",
        )
    return f"it ended with exit code {end.code} and left no exit record", "see its log"


def _list_evidence(pod: Pod, init: InitContainer, end: ContainerTermination) -> tuple[str, ...]:
    again = f", restarted {init.restarts} times" if init.restarts else ""
    lines = [f"pod/{pod.name}: {init.name} ended with exit code {end.code}{again}"]
    if end.record is not None:
        lines.append(f"exit record: cause {end.record.cause}, code {end.record.code}")
    return tuple(lines)


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
    field = "spec.train.init" if found[2] else f"spec.data[{found[1]}]"
    return f"raise {field}.size: it limits what the files take up on the node's disk"

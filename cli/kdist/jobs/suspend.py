"""Suspend, stop and resume. Pods end by SIGTERM, save their current step, and later continue from
it. A job in a Kueue queue is suspended through its Workload object, because Kueue owns the
`suspend` field there.

Suspended and stopped jobs are in the same state on the cluster. They differ for `kdist wait` and
`kdist status`: a suspended job waits to be resumed, a stopped job is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kdist import rbac
from kdist.errors import KdistError, NotFoundError
from kdist.jobs import agents, wait
from kdist.jobs.job import ClusterJob, Document
from kdist.jobs.wait import PodExits, Tell
from kdist.status import ASKED, Pod
from kdist.status.documents import annotation, integer

_GROUP, _KIND = "kueue.x-k8s.io/", "Workload"


def is_queued(target: ClusterJob) -> bool:
    """Whether the job was sent to a queue."""
    return target.job.spec.queue is not None


def set_active(target: ClusterJob, *, active: bool, dry_run: bool) -> None:
    """Let Kueue end the job's pods and keep it out, or admit it again. Raises `KdistError` where
    Kueue knows nothing of it.
    """
    version = _version(target)
    found = _find(target, version) if version else None
    if version is None or found is None:
        raise KdistError(
            (
                f"{target.name} waits in queue {target.job.spec.queue}, but there is no "
                "Workload of Kueue for it"
            ),
            hint="is Kueue installed, and does the LocalQueue exist?",
            next_command=target.command("why"),
        )
    target.cluster.patch(
        version, _KIND, found["metadata"]["name"], {"spec": {"active": active}}, dry_run=dry_run
    )


def _version(target: ClusterJob) -> str | None:
    return max(
        (
            version
            for version, kind in target.cluster.kinds()
            if kind == _KIND and version.startswith(_GROUP)
        ),
        default=None,
    )


def _find(target: ClusterJob, version: str) -> Document | None:
    uid = target.workload()["metadata"]["uid"]
    for one in target.cluster.list(version, _KIND):
        if any(owner.get("uid") == uid for owner in one["metadata"].get("ownerReferences") or []):
            return one
    return None


SPARE_SECONDS = 60.0
"""What the cluster gets to end pods beside the grace that they have themselves."""
STARTING_SECONDS = 600.0
_RENEWAL_SECONDS = 60.0
_RUNNING = ("running", "checkpointing")


def suspend(
    target: ClusterJob,
    word: Literal["suspended", "stopped"],
    *,
    wait: bool,
    timeout: float | None,
    tell: Tell,
    dry_run: bool = False,
) -> str:
    """Let the job save and end its pods; returns the sentence that says so.

    Raises `KdistError` for a job that is over, for pods that do not end in time, and for a state
    that could not be saved.
    """
    before = annotation(target.config_map, ASKED)
    state = target.state()
    if state.finished:
        raise KdistError(
            f"{target.name} is over ({state.finished}), there is nothing to be {word}",
            next_command=target.command("status"),
        )
    leaving = [pod for pod in target.pods() if not pod.over]
    if state.suspended and not leaving and not is_queued(target):
        target.ask(word, dry_run=dry_run)
        return f"{target.name} is {word}" if before != word else f"{target.name} is {word} already"
    _require(target, dry_run=dry_run)
    _hold(target, dry_run=dry_run)
    target.ask(word, dry_run=dry_run)
    if dry_run:
        return f"{target.name} {word} (server dry run)"
    if not wait:
        return f"{target.name} is being {word}; its {_count(leaving)} will save and end"
    exits = wait_for_pods(target, leaving, timeout=timeout, tell=tell)
    return describe(target, word, exits)


def wait_for_pods(
    target: ClusterJob, leaving: Iterable[Pod], *, timeout: float | None, tell: Tell
) -> PodExits:
    """Wait until these pods have saved and ended; the time they get is their grace and some more,
    unless `timeout` says.
    """
    leaving = list(leaving)
    grace = target.job.spec.termination_grace_period_seconds
    if leaving:
        tell(f"waiting for {_count(leaving)} to save and end, which may take {grace} s")
    limit = grace + SPARE_SECONDS if timeout is None else timeout
    return wait.wait_for_exit(
        target,
        leaving=[pod.name for pod in leaving],
        timeout=limit,
        what=f"{target.name} did not stop",
    )


def describe(target: ClusterJob, word: str, exits: PodExits) -> str:
    """The sentence at the end. Raises `KdistError` where the state could not be saved."""
    if exits.failures:
        pod, record = exits.failures[0]
        raise KdistError(
            (
                f"{target.name} is {word}, but {pod} ended with code {record.code}: "
                f"{record.message or record.cause}"
            ),
            hint="it will go on from the checkpoint before",
            next_command=target.command("checkpoints"),
        )
    at = f" after step {exits.step:,}, state saved" if exits.step is not None else ""
    kept = "" if target.job.spec.checkpoints else "; it has no checkpoints, so it will begin anew"
    return f"{target.name} {word}{at}{kept}. Next: {target.command('resume')}   goes on from there"


def resume(
    target: ClusterJob, *, wait: bool, timeout: float | None, tell: Tell, dry_run: bool = False
) -> str:
    """Let a suspended or stopped job go on; returns the sentence that says so, with the step it
    goes on from.

    Raises `KdistError` for a job that is over or gone, and for one that does not start in time.
    """
    state = target.state()
    if state.finished:
        raise KdistError(
            f"{target.name} is over ({state.finished})", next_command=target.command("restart")
        )
    asked = annotation(target.config_map, ASKED)
    if not state.suspended and not asked:
        return f"{target.name} is not suspended"
    _require(target, dry_run=dry_run)
    target.ask(None, dry_run=dry_run)
    resume_workload(target, dry_run=dry_run)
    if dry_run:
        return f"{target.name} resumed (server dry run)"
    if not wait:
        return f"{target.name} is being resumed. Next: {target.command('status', '-w')}"
    return f"{target.name} resumed{wait_until_running(target, timeout=timeout, tell=tell)}"


def _require(target: ClusterJob, *, dry_run: bool) -> None:
    """Both changes or none; a rehearsal hears it from the server itself."""
    if not dry_run:
        wanted = target.patch_rights()
        rbac.require(target.cluster, wanted[:1] if is_queued(target) else wanted)


def _hold(target: ClusterJob, *, dry_run: bool) -> None:
    if is_queued(target):
        set_active(target, active=False, dry_run=dry_run)
    else:
        target.patch_workload(
            target.backend.suspend_patch(True, nodes=target.job.spec.nodes.max), dry_run=dry_run
        )


def resume_workload(target: ClusterJob, *, dry_run: bool = False) -> None:
    """Let the workload make its pods again."""
    if is_queued(target):
        set_active(target, active=True, dry_run=dry_run)
    else:
        if not dry_run and target.backend.parks:
            wait.wait_until(
                lambda: True if _is_renewed(target.workload()) else None,
                timeout=_RENEWAL_SECONDS,
                what=f"the controller of {target.name} to take note that it has no pods",
                tell=lambda _: None,
            )
        target.patch_workload(
            target.backend.suspend_patch(False, nodes=target.job.spec.nodes.max), dry_run=dry_run
        )


def _is_renewed(workload: Mapping[str, Any]) -> bool:
    """Whether a StatefulSet without pods will make the next ones from its newest template, as its
    status says.
    """
    status = workload.get("status") or {}
    seen = integer(status, "observedGeneration"), integer(workload, "metadata", "generation")
    return status.get("currentRevision") == status.get("updateRevision") and seen[0] == seen[1]


def suspend_workload(target: ClusterJob) -> None:
    """Let the workload end its pods."""
    _hold(target, dry_run=False)


def wait_until_running(target: ClusterJob, *, timeout: float | None, tell: Tell) -> str:
    """Wait until a rank trains; where it goes on, as the end of a sentence."""

    def look() -> str | None:
        state = target.state()
        if state.finished:
            return f" and is over ({state.finished})"
        pods = target.pods()
        readings = agents.read(target, pods, timeout=3.0)
        if not any(reading.status.get("state") in _RUNNING for reading in readings.values()):
            return None
        return _where(target, [pod for pod in pods if pod.running])

    return wait.wait_until(
        look,
        timeout=STARTING_SECONDS if timeout is None else timeout,
        what=f"{target.name} to train again",
        tell=tell,
        next_command=target.command("why"),
    )


def _where(target: ClusterJob, pods: Iterable[Pod]) -> str:
    """What rank 0 logged about where it goes on."""
    for pod in pods:
        try:
            lines = list(target.cluster.logs(pod.name, container=pod.container))
        except (KdistError, NotFoundError):
            continue
        for line in reversed(lines):
            event = _event(line)
            if event.get("event") == "resumed":
                return f": goes on after step {event.get('step'):,}"
            if event.get("event") == "training-started":
                return ": begins anew, there was no checkpoint"
    return ""


def _event(line: str) -> dict[str, object]:
    start = line.find('{"time"')
    if start < 0 or ('"resumed"' not in line and '"training-started"' not in line):
        return {}
    try:
        found = json.loads(line[start:])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _count(pods: Iterable[Pod]) -> str:
    number = len(list(pods))
    return "1 pod" if number == 1 else f"{number} pods"

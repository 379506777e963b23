"""Suspend and resume. Pods end by SIGTERM, save their current step, and later continue from it. A
job in a Kueue queue is suspended through its Workload object, because Kueue owns the `suspend`
field there.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdist import events
from kdist.cluster.polling import wait_until
from kdist.errors import KdistError, NotFoundError
from kdist.job.cluster import agents, wait
from kdist.job.cluster.applied import AppliedJob
from kdist.job.cluster.wait import PodExits
from kdist.job.job import CANNOT_SUSPEND, NOT_SUSPENDED, Change, Changed
from kdist.manifest import QUEUE_PREFIX
from kdist.status import Pod
from kdist.status.documents import integer, items, uid
from kdist.status.pods import describe_saved
from kdist.units import count

_KIND = "Workload"


def is_queued(target: AppliedJob) -> bool:
    """Whether the job was sent to a queue."""
    return target.job.spec.queue is not None


def set_active(target: AppliedJob, *, active: bool, dry_run: bool = False) -> None:
    """Let Kueue evict the job, or admit it again. Raises `KdistError` if Kueue has no Workload for
    it.
    """
    kinds = target.cluster.kinds()
    served = [one for one, kind in kinds if kind == _KIND and one.startswith(QUEUE_PREFIX)]
    version, found = max(served, default=""), None
    if version:
        own = uid(target.workload())
        for one in target.cluster.list(version, _KIND):
            if any(owner.get("uid") == own for owner in items(one, "metadata", "ownerReferences")):
                found = one
                break
    if found is None:
        raise KdistError(
            (
                f"{target.name} waits in queue {target.job.spec.queue}, but there is no "
                "Workload of Kueue for it"
            ),
            hint="is Kueue installed, and does the LocalQueue exist?",
            next_command=target.command("why"),
        )
    target.pod_objects().change(
        version, _KIND, found["metadata"]["name"], {"spec": {"active": active}}, dry_run=dry_run
    )


SPARE_SECONDS = 60.0
"""Seconds that the cluster may need to end pods, in addition to their grace period."""
STARTING_SECONDS = 600.0
"""Seconds after which a job is expected to train."""
_RUNNING = ("running", "checkpointing")


def suspend(target: AppliedJob, how: Change) -> str:
    """Suspend the job: its pods save and end. See `Job.suspend`."""
    if how.dry_run == "client":
        return f"{target.name} would be suspended (client dry run)"
    dry_run = how.dry_run == "server"
    state = target.state()
    if state.finished:
        raise KdistError(
            f"job {target.name} has finished ({state.finished}) {CANNOT_SUSPEND}",
            next_command=target.command("status"),
        )
    leaving = [pod for pod in target.pods() if not pod.over]
    if not leaving and target.changes.is_suspended(state):
        if target.changes.is_asked:
            return f"{target.name} is already suspended"
        target.changes.record("suspended", dry_run=dry_run)
        return f"{target.name} is suspended"
    target.changes.require(dry_run=dry_run)
    target.changes.suspend(dry_run=dry_run)
    target.changes.record("suspended", dry_run=dry_run)
    if dry_run:
        return f"{target.name} suspended (server dry run)"
    if not how.wait:
        return (
            f"{target.name} is being suspended; its {count(len(leaving), 'pod')} will save and end"
        )
    exits = wait_for_pods(target, leaving, timeout=how.timeout)
    if exits.step is not None:
        target.changes.record(f"suspended {exits.step}")
    if exits.failures:
        pod, record = exits.failures[0]
        raise KdistError(
            (
                f"{target.name} is suspended, but {pod} ended with code {record.code}: "
                f"{record.message or record.cause}"
            ),
            hint="it will resume from the previous checkpoint",
            next_command=target.command("checkpoints"),
        )
    saved = "it has no checkpoints, so it will start from scratch"
    if target.job.spec.checkpoints:
        saved = describe_saved([exits.step])
    then = "continues from there" if exits.step is not None else ""
    return Changed(
        f"{target.name} suspended; {saved}", target.command("resume"), then, saved=exits.step
    )


def wait_for_pods(target: AppliedJob, leaving: Iterable[Pod], *, timeout: float | None) -> PodExits:
    """Wait until pods have saved and ended, for `timeout` seconds, or without it for their grace
    period and `SPARE_SECONDS`. Raises `KdistError` if they do not end in time (TIMEOUT).
    """
    leaving = list(leaving)
    grace = target.job.spec.termination_grace_period_seconds
    if leaving:
        target.dialog.notify(
            f"waiting for {count(len(leaving), 'pod')} to save and end, which may take {grace} s"
        )
    limit = grace + SPARE_SECONDS if timeout is None else timeout
    return wait.wait_for_exit(
        target,
        leaving=[pod.name for pod in leaving],
        timeout=limit,
        what=f"{target.name} did not stop",
    )


def resume(target: AppliedJob, how: Change) -> str:
    """Resume a suspended job. See `Job.resume`."""
    if how.dry_run == "client":
        return f"{target.name} would be resumed (client dry run)"
    dry_run = how.dry_run == "server"
    state = target.state()
    if state.finished:
        raise KdistError(
            f"job {target.name} has finished ({state.finished})",
            next_command=target.command("restart"),
        )
    if not target.changes.can_resume(state):
        return f"{target.name} {NOT_SUSPENDED}"
    target.changes.require(dry_run=dry_run)
    target.changes.resume(dry_run=dry_run)
    if dry_run:
        return f"{target.name} resumed (server dry run)"
    if not how.wait:
        return Changed(f"{target.name} is being resumed", target.command("status", "-w"))
    return f"{target.name} resumed{wait_until_running(target, timeout=how.timeout)}"


def wait_until_running(target: AppliedJob, *, timeout: float | None) -> str:
    """Wait until a rank trains; returns where it resumed, as the end of a message."""

    def poll() -> str | None:
        state = target.state()
        if state.finished:
            return f" and has finished ({state.finished})"
        pods = target.pods()
        samples = agents.fetch_samples(target, pods, timeout=agents.TIMEOUT)
        if not any(sample.status.get("state") in _RUNNING for sample in samples.values()):
            return None
        return _describe_start(target, [pod for pod in pods if pod.running])

    return wait_until(
        poll,
        timeout=STARTING_SECONDS if timeout is None else timeout,
        what=f"{target.name} to train again",
        notify=target.dialog.notify,
        next_command=target.command("why"),
    )


def _describe_start(target: AppliedJob, pods: Iterable[Pod]) -> str:
    """Where training resumed, from the log of rank 0."""
    for pod in pods:
        found = ""
        try:
            for line in target.cluster.logs(pod.name, container=pod.container):
                event = events.parse(line)
                if event is not None and event["event"] == "resumed":
                    step = integer(event, "step")
                    found = ": resumes" if step is None else f": resumes after step {step:,}"
                if event is not None and event["event"] == "training-started":
                    found = ": starts from scratch, there was no checkpoint"
        except (KdistError, NotFoundError):
            continue
        if found:
            return found
    return ""

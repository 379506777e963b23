"""Waits for a job to reach a status, for its pods to end, or for any other condition, up to a
timeout whose error names the condition. A wait continues while the API server is unreachable, and
ends when the status can no longer be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kdist.diagnose import diagnose
from kdist.errors import Code, KdistError, NotFoundError
from kdist.jobs.agents import Agents
from kdist.jobs.events import Events
from kdist.jobs.snapshot import fetch_snapshot, finalize
from kdist.status import ExitRecord, JobStatus, Phase, Pod, Snapshot, read_pod

if TYPE_CHECKING:
    from kdist.cluster import Cluster
    from kdist.jobs.job import ClusterJob

T = TypeVar("T")
Tell = Callable[[str], None]

EVERY_SECONDS = 0.5
_TELL_AFTER = 5.0
_LOOK_AGAIN = 5.0


def wait_until(
    look: Callable[[], T | None],
    *,
    timeout: float,
    what: str,
    tell: Tell,
    hint: str = "",
    next_command: str = "",
) -> T:
    """What `look` gives once it is not None. Raises `KdistError` (TIMEOUT) after `timeout` seconds,
    naming `what`.
    """
    began = time.monotonic()
    told = False
    while True:
        found = look()
        if found is not None:
            return found
        waited = time.monotonic() - began
        if waited > timeout:
            raise KdistError(
                f"{what}: not within {timeout:.0f} s",
                hint=hint,
                next_command=next_command,
                code=Code.TIMEOUT,
            )
        if not told and waited > _TELL_AFTER:
            told = True
            tell(f"waiting: {what} …")
        time.sleep(EVERY_SECONDS)


@dataclass
class PodExits:
    """What ending pods left behind: the exit record of each, as it was last seen."""

    records: dict[str, ExitRecord] = field(default_factory=dict)

    def see(self, pods: Collection[Pod]) -> None:
        """Take in what the pods say now."""
        for pod in pods:
            if pod.record is not None:
                self.records[pod.name] = pod.record

    @property
    def step(self) -> int | None:
        """The step that was saved, as far as it was told."""
        return max(
            (record.step for record in self.records.values() if record.step is not None),
            default=None,
        )

    @property
    def failures(self) -> list[tuple[str, ExitRecord]]:
        """Pods that did not save: their agents ended by something else than the wish to stop."""
        return [
            (pod, record) for pod, record in self.records.items() if record.code not in (0, 200)
        ]


def wait_for_exit(
    target: ClusterJob, *, leaving: Collection[str], timeout: float, what: str
) -> PodExits:
    """Wait until the pods named in `leaving` have ended or are gone. Raises `KdistError` (TIMEOUT)
    after `timeout` seconds.

    They are watched, because the record of a deleted pod is there for a moment only.
    """
    exits, end = PodExits(), time.monotonic() + timeout
    while True:
        there = [pod for pod in target.pods() if pod.name in leaving]
        exits.see(there)
        left = {pod.name for pod in there if not pod.over}
        if not left:
            return exits
        remaining = end - time.monotonic()
        if remaining <= 0:
            break
        _watch(target, left, exits, seconds=min(_LOOK_AGAIN, remaining))
    raise KdistError(
        f"{what}: {', '.join(sorted(left))} did not end within {timeout:.0f} s",
        next_command=target.command("why"),
        code=Code.TIMEOUT,
    )


def _watch(target: ClusterJob, left: set[str], exits: PodExits, *, seconds: float) -> None:
    """See pods off until all in `left` have ended, or for so long: one may have gone just before
    the watch began.
    """
    selector = target.backend.pod_selector(target.name)
    for change, document in target.cluster.watch("v1", "Pod", selector=selector, timeout=seconds):
        pod = read_pod(document)
        if pod.name in left:
            exits.see([pod])
            if change == "DELETED" or pod.over:
                left.discard(pod.name)
        if not left:
            return


PAUSE = 1.0  # seconds between two looks; after a minute twice as long
_LATER = 60.0


def _is_done(status: JobStatus) -> bool:
    return status.phase is Phase.SUCCEEDED


def _runs(status: JobStatus) -> bool:
    return status.phase is Phase.SUCCEEDED or (
        status.phase is Phase.RUNNING and status.reason != "NoAnswer"
    )


def _has_stepped(status: JobStatus) -> bool:
    return status.phase is Phase.SUCCEEDED or (_runs(status) and bool(status.step))


def _has_saved(status: JobStatus) -> bool:
    return status.phase is Phase.SUCCEEDED or status.last_checkpoint_step is not None


def _rests(status: JobStatus) -> bool:
    return status.phase is Phase.SUSPENDED and all(pod.over for pod in status.pods)


def _is_stopped(status: JobStatus) -> bool:
    return status.phase is Phase.STOPPED


GOALS: dict[str, Callable[[JobStatus], bool]] = {
    "done": _is_done,
    "running": _runs,
    "first-step": _has_stepped,
    "checkpoint": _has_saved,
    "suspended": _rests,
    "stopped": _is_stopped,
    "deleted": lambda _: False,
}


def wait_for(
    cluster: Cluster,
    name: str,
    goal: str = "done",
    *,
    namespace: str | None = None,
    timeout: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
    pause: float = PAUSE,
) -> JobStatus | None:
    """The status in which the job reached the goal, one of `GOALS`; None once it is gone, where
    that is the goal.

    `timeout` is in seconds, None for ever; `tell` hears of every change. Raises `KdistError`:
    JOB_FAILED or JOB_CANCELLED if the job ended otherwise, TIMEOUT with what keeps it, UNREACHABLE
    if the API server never answers or is away at the end; `NotFoundError` if there is no such job.
    """
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    place = namespace or cluster.namespace
    agents, events = Agents(cluster, namespace=place), Events(cluster, place)
    seen: Snapshot | None = None
    told = ""
    while True:
        try:
            seen = fetch_snapshot(cluster, name, namespace, agents=agents, events=events)
        except NotFoundError:
            if goal == "deleted":
                return None
            raise
        except KdistError as error:
            late = seen is None if deadline is None else time.monotonic() >= deadline
            if late or not _is_outage(error):
                raise
        else:
            if (now := describe_status(seen.status)) != told:
                tell(told := now)
            finalize(cluster, seen)
            if GOALS[goal](seen.status):
                return seen.status
            if goal != "deleted":
                _raise_if_over(seen, goal)
        if deadline is not None and time.monotonic() >= deadline:
            raise too_late(seen, goal, timeout or 0.0)
        time.sleep(
            min(_next_pause(pause, began), max(0.0, (deadline or float("inf")) - time.monotonic()))
        )


def _next_pause(pause: float, began: float) -> float:
    return pause if time.monotonic() - began < _LATER else 2 * pause


def _is_outage(error: KdistError) -> bool:
    """Whether the server is away, rather than that it refuses us."""
    return error.code is Code.UNREACHABLE and getattr(error, "status", 500) >= 500


def describe_status(status: JobStatus) -> str:
    """The job's phase in a line that changes only when the job does."""
    reason = f" ({status.reason})" if status.reason and status.reason != status.phase else ""
    nodes = f", {status.nodes} nodes" if status.phase in (Phase.RUNNING, Phase.RECOVERING) else ""
    message = (
        f": {status.message}" if status.message and status.phase is not Phase.SUCCEEDED else ""
    )
    return f"{status.name}: {status.phase}{reason}{nodes}{message}"


def exit_code(status: JobStatus) -> Code:
    """The exit code of a command that stays until the job is over: what came of it."""
    return {Phase.FAILED: Code.JOB_FAILED, Phase.STOPPED: Code.JOB_CANCELLED}.get(
        status.phase, Code.OK
    )


def _raise_if_over(seen: Snapshot, goal: str) -> None:
    status = seen.status
    if not status.phase.terminal:
        return
    cause = diagnose(seen)
    code = exit_code(status) or Code.ERROR
    what = {Phase.FAILED: "failed", Phase.STOPPED: "was stopped"}.get(status.phase, "is done")
    if status.phase is not Phase.FAILED:
        raise KdistError(f"{status.name} {what}; it will not be {goal}", code=code)
    place = f" -n {status.namespace}" if status.namespace else ""
    raise KdistError(
        f"{status.name} failed: {cause.sentence}",
        hint=cause.fix,
        next_command=f"kdist why {status.name}{place}",
        code=code,
    )


def too_late(seen: Snapshot | None, goal: str, timeout: float) -> KdistError:
    """A time-out that says what the job waits for, as far as it was seen."""
    if seen is None:
        return KdistError(
            f"the API server did not answer within {timeout:.0f} s",
            next_command="kdist doctor",
            code=Code.TIMEOUT,
        )
    status, cause = seen.status, diagnose(seen)
    place = f" -n {status.namespace}" if status.namespace else ""
    return KdistError(
        f"{status.name} is {status.phase} and not {goal} after {timeout:.0f} s: {cause.sentence}",
        hint=cause.fix,
        next_command=f"kdist why {status.name}{place}",
        code=Code.TIMEOUT,
    )

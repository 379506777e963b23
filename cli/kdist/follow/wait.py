"""Waits until a job has come so far, or can no longer come there. Nothing is lost while the API server is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kdist.diagnose import diagnose
from kdist.errors import Code, KdistError, NotFoundError
from kdist.follow.agents import Agents
from kdist.follow.fetch import snapshot
from kdist.follow.heard import Events
from kdist.follow.settle import settle
from kdist.status import JobStatus, Phase, Snapshot

if TYPE_CHECKING:
    from kdist.cluster import Cluster

PAUSE = 1.0  # seconds between two looks; after a minute twice as long
_LATER = 60.0


def _is_done(status: JobStatus) -> bool:
    return status.phase is Phase.SUCCEEDED


def _runs(status: JobStatus) -> bool:
    return status.phase is Phase.SUCCEEDED or (status.phase is Phase.RUNNING and status.reason != "NoAnswer")


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


def until(
    cluster: Cluster,
    name: str,
    goal: str = "done",
    *,
    namespace: str | None = None,
    timeout: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
    pause: float = PAUSE,
) -> JobStatus | None:
    """The status in which the job reached the goal, one of `GOALS`; None once it is gone, where that is the goal.

    `timeout` is in seconds, None for ever; `tell` hears of every change. Raises `KdistError`: JOB_FAILED or JOB_CANCELLED if the
    job ended otherwise, TIMEOUT with what keeps it, UNREACHABLE if the API server never answers or is away at the end;
    `NotFoundError` if there is no such job.
    """
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    place = namespace or cluster.namespace
    agents, events = Agents(cluster, namespace=place), Events(cluster, place)
    seen: Snapshot | None = None
    told = ""
    while True:
        try:
            seen = snapshot(cluster, name, namespace, agents=agents, events=events)
        except NotFoundError:
            if goal == "deleted":
                return None
            raise
        except KdistError as error:
            late = seen is None if deadline is None else time.monotonic() >= deadline
            if late or not _is_outage(error):
                raise
        else:
            if (now := describe(seen.status)) != told:
                tell(told := now)
            settle(cluster, seen)
            if GOALS[goal](seen.status):
                return seen.status
            if goal != "deleted":
                _raise_if_over(seen, goal)
        if deadline is not None and time.monotonic() >= deadline:
            raise too_late(seen, goal, timeout or 0.0)
        time.sleep(min(_next_pause(pause, began), max(0.0, (deadline or float("inf")) - time.monotonic())))


def _next_pause(pause: float, began: float) -> float:
    return pause if time.monotonic() - began < _LATER else 2 * pause


def _is_outage(error: KdistError) -> bool:
    """Whether the server is away, rather than that it refuses us."""
    return error.code is Code.UNREACHABLE and getattr(error, "status", 500) >= 500


def describe(status: JobStatus) -> str:
    """The job's phase in a line that changes only when the job does."""
    reason = f" ({status.reason})" if status.reason and status.reason != status.phase else ""
    nodes = f", {status.nodes} nodes" if status.phase in (Phase.RUNNING, Phase.RECOVERING) else ""
    message = f": {status.message}" if status.message and status.phase is not Phase.SUCCEEDED else ""
    return f"{status.name}: {status.phase}{reason}{nodes}{message}"


def ending(status: JobStatus) -> Code:
    """The exit code of a command that stays until the job is over: what came of it."""
    return {Phase.FAILED: Code.JOB_FAILED, Phase.STOPPED: Code.JOB_CANCELLED}.get(status.phase, Code.OK)


def _raise_if_over(seen: Snapshot, goal: str) -> None:
    status = seen.status
    if not status.phase.terminal:
        return
    cause = diagnose(seen)
    code = ending(status) or Code.ERROR
    what = {Phase.FAILED: "failed", Phase.STOPPED: "was stopped"}.get(status.phase, "is done")
    if status.phase is not Phase.FAILED:
        raise KdistError(f"{status.name} {what}; it will not be {goal}", code=code)
    place = f" -n {status.namespace}" if status.namespace else ""
    raise KdistError(
        f"{status.name} failed: {cause.sentence}", hint=cause.fix, next_command=f"kdist why {status.name}{place}", code=code
    )


def too_late(seen: Snapshot | None, goal: str, timeout: float) -> KdistError:
    """A time-out that says what the job waits for, as far as it was seen."""
    if seen is None:
        return KdistError(f"the API server did not answer within {timeout:.0f} s", next_command="kdist doctor", code=Code.TIMEOUT)
    status, cause = seen.status, diagnose(seen)
    place = f" -n {status.namespace}" if status.namespace else ""
    return KdistError(
        f"{status.name} is {status.phase} and not {goal} after {timeout:.0f} s: {cause.sentence}",
        hint=cause.fix,
        next_command=f"kdist why {status.name}{place}",
        code=Code.TIMEOUT,
    )

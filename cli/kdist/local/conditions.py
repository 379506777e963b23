"""Waits until a run on this machine reaches a condition of `kdist wait`."""

from __future__ import annotations

import time
from collections.abc import Callable

from kdist.errors import Code, KdistError
from kdist.jobs import GOALS, describe_status, exit_code
from kdist.local.job import LocalJob
from kdist.local.status import read_status
from kdist.status import JobStatus

_POLL_SECONDS = 0.5


def wait_for(
    job: LocalJob, goal: str, *, timeout: float | None, notify: Callable[[str], None]
) -> JobStatus | None:
    """Wait until the run reaches a goal, and return its status then; None if it is deleted.

    Args:
        job: the run.
        goal: one of `GOALS`.
        timeout: in seconds; None waits forever.
        notify: receives each change of the status.

    Raises:
        KdistError: the run has ended otherwise (JOB_FAILED, JOB_CANCELLED), or did not reach the
            goal in time (TIMEOUT).
    """
    end = float("inf") if timeout is None else time.monotonic() + timeout
    reported = ""
    while job.root.is_dir():
        active = job.active
        status = read_status(job)
        if GOALS[goal](status):
            return status
        if (line := describe_status(status)) != reported:
            notify(line)
            reported = line
        if not active and goal != "deleted":
            raise KdistError(
                f"{job.name} is {status.phase}: its `kdist run` has ended before `{goal}`",
                next_command=job.kdist("why"),
                code=exit_code(status) or Code.JOB_CANCELLED,
            )
        if time.monotonic() >= end:
            raise KdistError(
                f"{job.name} is {status.phase} and has not reached `{goal}` after {timeout:.0f} s",
                next_command=job.kdist("why"),
                code=Code.TIMEOUT,
            )
        time.sleep(_POLL_SECONDS)
    return None

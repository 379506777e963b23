"""Suspends an active run on this machine, and resumes it in the background."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from kdist.errors import Code, KdistError
from kdist.job.local.detach import launch_detached
from kdist.job.local.job import LocalJob
from kdist.job.local.status import read_status
from kdist.status import Phase

_SPARE_SECONDS = 30.0  # in addition to the grace period of the ranks
_POLL_SECONDS = 0.1


def suspend(
    job: LocalJob,
    *,
    wait: bool,
    timeout: float | None,
    notify: Callable[[str], None],
    dry_run: str = "none",
) -> str:
    """Suspend the run, and return the result as a message.

    Args:
        job: the run.
        wait: wait until it has saved and ended.
        timeout: seconds to wait; None for the grace period of the ranks and a margin.
        notify: receives messages about progress.
        dry_run: `none`, or how it is called: then nothing is done.

    Raises:
        KdistError: the run is not active, could not save, or does not end in time (TIMEOUT).
    """
    pid = job.pid
    if pid is None:
        status = read_status(job)
        if status.phase is Phase.SUSPENDED:
            return f"{job.name} is already suspended: {status.message}"
        raise KdistError(
            f"{job.name} is not running ({status.phase}) and cannot be suspended",
            next_command=job.kdist("status"),
        )
    if dry_run != "none":
        return f"{job.name} would be suspended ({dry_run} dry run)"
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError as error:
        raise KdistError(f"process {pid} of {job.name}: {error.strerror}") from error
    if not wait:
        return f"{job.name} is being suspended; it saves and ends"
    notify(f"waiting for {job.name} (pid {pid}) to save and end")
    limit = job.grace_seconds + _SPARE_SECONDS if timeout is None else timeout
    end = time.monotonic() + limit
    while job.active:
        if time.monotonic() >= end:
            raise KdistError(
                f"{job.name} has not ended within {limit:.0f} s",
                next_command=job.kdist("status"),
                code=Code.TIMEOUT,
            )
        time.sleep(_POLL_SECONDS)
    status = read_status(job)
    if status.phase is not Phase.SUSPENDED:
        how = "has ended" if status.phase is Phase.STOPPED else f"was not suspended: {status.phase}"
        raise KdistError(
            f"{job.name} {how}: {status.message}".rstrip(": "),
            next_command=job.kdist("status"),
        )
    then = "continues from there" if status.last_checkpoint_step else "starts from the beginning"
    return f"{job.name} is suspended: {status.message}. Next: {job.next_resume}   {then}"


def resume(job: LocalJob, *, notify: Callable[[str], None], dry_run: str = "none") -> str:
    """Start the run's recorded command again in the background, and return a message.

    Args:
        job: the run.
        notify: receives the output of a run that ends at once.
        dry_run: as for `suspend`.

    Raises:
        KdistError: the run is done, has no recorded command, or ended at once.
    """
    status = read_status(job)
    if job.active:
        return f"{job.name} is not suspended"
    if status.phase is Phase.SUCCEEDED:
        raise KdistError(
            f"{job.name} is done and cannot be resumed",
            hint="--fresh archives it and starts at step 0",
            next_command=job.next_run_with(fresh=True),
        )
    command = job.command
    if command is None:
        raise KdistError(
            f"the command that started {job.name} is not recorded",
            hint="the `kdist run` that you started it with continues it",
        )
    if dry_run != "none":
        return f"{job.name} would be resumed ({dry_run} dry run)"
    launched = launch_detached(command, job.folder_of_command)
    if not launched.begun:
        notify(launched.output.rstrip())
        raise KdistError(f"{job.name} was not resumed: `{job.next_run}` ended at once")
    return f"{job.name} runs again (pid {launched.pid}); its output is in {launched.log}"

"""What a status means to whoever waits for a job: its goals, its line and its exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kdist.errors import Code, KdistError
from kdist.status import JobStatus, Phase

if TYPE_CHECKING:
    from kdist.diagnose import Diagnosis


def _is_running(status: JobStatus) -> bool:
    return status.phase is Phase.SUCCEEDED or (
        status.phase is Phase.RUNNING and status.reason != "NoAnswer"
    )


GOALS: dict[str, Callable[[JobStatus], bool]] = {
    "done": lambda status: status.phase is Phase.SUCCEEDED,
    "running": _is_running,
    "first-step": lambda job: job.phase is Phase.SUCCEEDED or (_is_running(job) and bool(job.step)),
    "checkpoint": lambda job: job.phase is Phase.SUCCEEDED or job.last_checkpoint_step is not None,
    "suspended": lambda job: job.phase is Phase.SUSPENDED and all(pod.over for pod in job.pods),
    "deleted": lambda _: False,
}
"""What a job can be waited for, by its name. A job that has succeeded has passed the first four:
its last steps and checkpoints may not be known any more.
"""


def describe_status(status: JobStatus) -> str:
    """The job's phase in a line that changes only when the job does."""
    reason = f" ({status.reason})" if status.reason and status.reason != status.phase else ""
    nodes = f", {status.nodes} nodes" if status.phase in (Phase.RUNNING, Phase.RECOVERING) else ""
    message = (
        f": {status.message}" if status.message and status.phase is not Phase.SUCCEEDED else ""
    )
    if status.fetch is not None and status.fetch.total:
        percent = 100 * status.fetch.done // status.fetch.total
        message += f", {percent // 10 * 10} %"
    return f"{status.name}: {status.phase}{reason}{nodes}{message}"


def describe_continuation(saved: int | None) -> str:
    """Where a run goes on that has saved this step."""
    return "continues from there" if saved else "starts from the beginning"


def exit_code(status: JobStatus) -> Code:
    """The exit code of a command that has waited until the job ended."""
    return {Phase.SUCCEEDED: Code.OK, Phase.FAILED: Code.JOB_FAILED}.get(
        status.phase, Code.JOB_CANCELLED
    )


def end_error(
    status: JobStatus, goal: str, *, explain: Callable[[], Diagnosis], command: str
) -> KdistError:
    """The error of a wait for a job that does not run any more, and so reaches no other goal.

    Args:
        status: how it ended.
        goal: what was waited for.
        explain: is called for a job that has failed or is suspended.
        command: explains the job's state.
    """
    code = exit_code(status) or Code.ERROR
    what = {Phase.STOPPED: "was stopped", Phase.SUCCEEDED: "is done"}
    message = f"{status.name} {what.get(status.phase, f'is {status.phase}')}"
    message, hint = f"{message}; it will not reach `{goal}`", ""
    if status.phase is Phase.FAILED:
        cause = explain()
        message, hint = f"{status.name} failed: {cause.sentence}", cause.fix
    elif status.phase is Phase.SUSPENDED:
        cause = explain()
        hint, command = cause.fix, (*cause.commands, command)[0]
    return KdistError(message, hint=hint, next_command=command, code=code)


def timeout_error(
    status: JobStatus, goal: str, timeout: float, *, cause: Diagnosis, command: str
) -> KdistError:
    """The error of a wait that timed out: it says what the job waits for."""
    return KdistError(
        f"{status.name} is {status.phase} and has not reached `{goal}` after {timeout:.0f} s: "
        f"{cause.sentence}",
        hint=cause.fix,
        next_command=command,
        code=Code.TIMEOUT,
    )

"""A wait that cannot succeed ends with one error, wherever the job runs."""

from __future__ import annotations

import pytest

from kdist.diagnose import Diagnosis
from kdist.errors import Code
from kdist.job.goals import end_error
from kdist.status import JobStatus, Nodes, Phase


def explain() -> Diagnosis:
    return Diagnosis("user-code", "rank 1 raised ValueError", "failed", fix="mend train.py")


@pytest.mark.parametrize(
    ("phase", "message", "code"),
    [
        (Phase.FAILED, "digits failed: rank 1 raised ValueError", Code.JOB_FAILED),
        (Phase.STOPPED, "digits was stopped; it will not reach `done`", Code.JOB_CANCELLED),
        (Phase.SUSPENDED, "digits is Suspended; it will not reach `done`", Code.JOB_CANCELLED),
        (Phase.SUCCEEDED, "digits is done; it will not reach `done`", Code.ERROR),
    ],
)
def test_a_job_that_has_ended_is_an_error_of_whoever_waits_for_something_else(
    phase: Phase, message: str, code: Code
) -> None:
    status = JobStatus("digits", "ml", "job", phase, "", "", Nodes(1, 1, 0))
    error = end_error(status, "done", explain=explain, command="kdist why digits")
    assert (str(error), error.code, error.next_command) == (message, code, "kdist why digits")
    assert error.hint == ("mend train.py" if phase in (Phase.FAILED, Phase.SUSPENDED) else "")


def test_whoever_waits_for_a_suspended_job_is_told_to_resume_it() -> None:
    status = JobStatus("digits", "ml", "job", Phase.SUSPENDED, "", "", Nodes(1, 1, 0))
    resume = "kdist resume digits"
    found = Diagnosis("suspended", "it is", "waiting", fix="resume it", commands=(resume,))
    error = end_error(status, "done", explain=lambda: found, command="kdist why digits")
    assert (error.hint, error.next_command) == ("resume it", resume)

"""When a job that does not progress is diagnosed."""

from __future__ import annotations

from itertools import pairwise

from kdist_controller.agent_poller import INTERVAL_SECONDS, STUCK_SECONDS, Inquiry


def diagnoses(inquiry: Inquiry, seconds: int) -> list[int]:
    """Moments at which a job that is looked at once a second needs a diagnosis, and gets it."""
    found = []
    for now in range(1000, 1000 + seconds):
        if inquiry.needs_diagnosis(now):
            inquiry.diagnosed(None, now)
            found.append(now - 1000)
    return found


def test_a_job_that_does_not_progress_is_diagnosed_less_and_less_often() -> None:
    found = diagnoses(Inquiry(stuck=True), 3600)
    pauses = [after - before for before, after in pairwise(found)]
    assert found[0] == 0
    assert pauses == sorted(pauses)
    assert len([each for each in found if each < INTERVAL_SECONDS]) > 2
    assert pauses[-1] == STUCK_SECONDS


def test_a_job_that_progresses_is_not_diagnosed() -> None:
    assert diagnoses(Inquiry(), 3600) == []

"""What is remarkable of a job that is done is said."""

from __future__ import annotations

from kdist.diagnose import diagnose
from kdist.status import WorkloadState
from tests.cli.diagnose.scenes import FAILED, scene
from tests.cli.status.objects import ended_pod, record


def test_ranks_without_a_process_group_are_said_of_a_job_that_is_done() -> None:
    ended = record(0, None, outcome="done", separate_ranks=2)
    pods = [ended_pod(0, 0, record=ended), ended_pod(1, 0, record=ended)]
    found = diagnose(scene(pods, state=WorkloadState(succeeded=2, finished="succeeded")))
    assert found.cause == "done"
    assert "none of its 2 ranks has formed a process group" in found.sentence
    assert "init_process_group()" in found.fix


def test_a_loss_that_was_not_finite_is_said_of_a_job_that_is_done() -> None:
    ended = record(0, None, outcome="done")
    told = record(0, None, outcome="done", nonfinite_loss={"steps": 19, "last": "nan"})
    found = diagnose(
        scene(
            [ended_pod(0, 0, record=ended), ended_pod(1, 0, record=told)],
            state=WorkloadState(succeeded=2, finished="succeeded"),
        )
    )
    assert found.cause == "done"
    assert "NaN or infinite in 19 reported steps, and is nan at the end" in found.sentence


def test_a_failure_says_too_that_the_loss_was_not_finite_before() -> None:
    ended = record(70, "user_code", nonfinite_loss={"steps": 1, "last": None})
    found = diagnose(scene([ended_pod(0, 70, record=ended)], state=FAILED))
    assert "the loss was NaN or infinite in 1 reported step" in found.evidence

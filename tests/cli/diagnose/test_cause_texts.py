"""Every cause that a trainer may write has its sentence."""

from __future__ import annotations

from kdist.diagnose import diagnose
from kdist.diagnose.cause_texts import CAUSES
from kdist.status import WorkloadState
from kdist_trainer.config.exit_codes import Cause
from tests.cli.diagnose.scenes import FAILED, scene
from tests.cli.status.objects import ended_pod, record


def test_every_cause_of_the_trainer_has_a_sentence() -> None:
    own_rules = {Cause.OOM_HOST}
    assert {each.value for each in set(Cause) - own_rules} == set(CAUSES)


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

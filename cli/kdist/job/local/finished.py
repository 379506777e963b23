"""Whether the run of a job is done already, so that `kdist run` has nothing to start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.errors import Code, KdistError
from kdist.spec import TrainingJob
from kdist.spec.edits import compare_done
from kdist_trainer.untrusted_text import parse_json


def is_finished(job: TrainingJob, done: Mapping[str, Any], train_json: str) -> bool:
    """Whether the finished run is what the job asks for; False if the job asks for more steps.

    Raises:
        KdistError: the job was edited in any other way, so that the old report is about another
            job.
    """
    finished = compare_done(done, parse_json(train_json))
    if finished.problem is not None:
        hint = (
            "--fresh archives the previous run and trains from scratch; more epochs or steps "
            "continue from its last checkpoint"
        )
        raise KdistError(
            f"{job.metadata.name}: {finished.problem}", hint=hint, code=Code.JOB_FAILED
        )
    return finished.is_complete

"""What was edited in a job since a checkpoint was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist_trainer.config.changes import Change, compare, explain_refusal
from kdist_trainer.errors import CheckpointMismatchError


def find_edits(
    settings: dict[str, Any], job: Mapping[str, Any], *, is_stream: bool
) -> list[Change]:
    """The fields that were edited since a checkpoint was written.

    Args:
        settings: The present `spec.train`.
        job: The job that wrote the checkpoint.
        is_stream: Whether the data set is a stream.

    Raises:
        CheckpointMismatchError: If a run with `settings` cannot continue from the checkpoint.
    """
    changes = compare(job["train"], settings, stream=is_stream) if "train" in job else []
    problem = explain_refusal(changes)
    if problem is not None:
        raise CheckpointMismatchError(problem)
    return changes

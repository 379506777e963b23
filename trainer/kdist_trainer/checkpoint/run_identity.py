"""What every checkpoint of a run says of where it comes from, and the document that says that the
run has ended.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import torch

import kdist_trainer
from kdist_trainer.checkpoint.group import CheckpointGroup
from kdist_trainer.checkpoint.manifest import CheckpointDirectory, Manifest, name_of
from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.errors import CheckpointMismatchError, StorageError
from kdist_trainer.json_text import encode_json


class RunIdentity:
    """The run, its job and its ranks."""

    def __init__(self, *, run_id: str, job: Mapping[str, Any], world_size: int) -> None:
        self.run_id = run_id
        self.job = dict(job)
        self._world_size = world_size
        digest = hashlib.sha256(encode_json(self.job, sort_keys=True).encode())
        self._config_digest = digest.hexdigest()

    def describe(
        self, state: Mapping[str, Any], *, step: int, epoch: int, parent: StoragePath | None
    ) -> Manifest:
        """The manifest of a state, without files."""
        return Manifest(
            step=step,
            epoch=epoch,
            samples_seen=state.get("samples_seen"),
            world_size=self._world_size,
            run_id=self.run_id,
            parent=parent.name if parent is not None else None,
            config_digest=self._config_digest,
            versions={
                "kdist": kdist_trainer.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )

    def describe_end(self, step: int, *, epoch: int, final: Mapping[str, Any]) -> dict[str, Any]:
        """The document that says that the run has ended with the checkpoint of `step`."""
        document = {"run_id": self.run_id, "step": step, "checkpoint": name_of(step, epoch)}
        return {**document, **final, "job": self.job}


def refuse_earlier(step: int, *, newest: int) -> None:
    """Raise `CheckpointMismatchError` if there is a checkpoint of a later step: that one would be
    resumed from.
    """
    if step < newest:
        raise CheckpointMismatchError(
            f"the state of step {step} is not saved: the newest checkpoint of this run is of "
            f"step {newest}, and a restart would resume from that one; count the steps on "
            "from what resume() has returned, or start again with --fresh"
        )


def write_done(
    directory: CheckpointDirectory,
    group: CheckpointGroup,
    document: dict[str, Any],
    *,
    sees_rank_zero_folder: bool,
) -> None:
    """Write DONE in the folder of every node. Collective. Raises `StorageError` after a second
    attempt.
    """

    def write() -> None:
        if group.is_rank_zero or not sees_rank_zero_folder:
            directory.write_done(document)

    for attempt in (1, 2):
        try:
            group.on_all_ranks(write)
        except OSError as error:
            if attempt == 2:
                raise StorageError(f"cannot write DONE to {directory.root}: {error}") from error
        else:
            return

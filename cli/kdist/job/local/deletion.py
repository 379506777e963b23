"""Deletes a run on this machine. Its checkpoints stay unless they are to be purged, and the folder
of checkpoints that a job file names is never deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kdist.errors import KdistError
from kdist.job.local import run_dir, suspension
from kdist.job.local.job import LocalJob
from kdist.job.local.run_dir import folder_of

_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunDeletion:
    """What is deleted of a run, and what stays.

    Attributes:
        job: the run.
        purge: whether the checkpoints in the run folder go too.
        kept: the checkpoint folder that stays; None if none does.
        is_purgeable: whether `--purge` would delete `kept`.
    """

    job: LocalJob
    purge: bool
    kept: Path | None
    is_purgeable: bool

    def run(self, *, timeout: float | None, notify: Callable[[str], None]) -> None:
        """Suspend the run if it is active, then delete it.

        Args:
            timeout: seconds for which an active run may save; None for its grace period.
            notify: receives messages about progress.

        Raises:
            KdistError: it could not save or did not end in time, or cannot be deleted.
        """
        if self.job.active:
            suspension.suspend(self.job, wait=True, timeout=timeout, notify=notify)
        run_dir.delete(self.job.root, keep=() if self.purge else (_CHECKPOINTS,))


def plan_deletion(job: LocalJob, *, purge: bool) -> RunDeletion:
    """What would be deleted of the run. Raises `KdistError` for a folder that is no run folder."""
    own = job.root / _CHECKPOINTS
    if not job.is_run_folder and job.root.parent != run_dir.home():
        raise KdistError(
            f"{job.root} holds checkpoints, but no run; kdist does not delete such a folder"
        )
    used = folder_of(job.root) if job.is_run_folder else own
    is_inside = used.is_relative_to(job.root)
    kept = None if (purge and is_inside) or not used.is_dir() else used
    return RunDeletion(job, purge, kept, is_inside)


def find_remains(name: str) -> LocalJob | None:
    """The folder of a deleted run NAME whose checkpoints have stayed; None if there is none."""
    root = run_dir.home() / name
    return LocalJob(root) if (root / _CHECKPOINTS).is_dir() else None

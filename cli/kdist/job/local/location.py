"""Where the checkpoints of a run on this machine are: in a folder, or in a bucket, of which the
folder `checkpoints` of the run then has a copy of the ledger and of DONE.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdist.job.local.run_dir import read_json
from kdist.spec import CHECKPOINTS_ENDPOINT, CHECKPOINTS_REGION, TrainingJob


class CheckpointLocation(NamedTuple):
    """A folder or a URL, as agents and the trainer's tools take it."""

    text: str
    variables: Mapping[str, str] = {}
    """Environment variables that say where the store of a URL is."""

    @property
    def is_bucket(self) -> bool:
        """Whether it is a URL."""
        return "://" in self.text

    @classmethod
    def of_run(cls, run: Mapping[str, Any]) -> CheckpointLocation:
        """The location that `run.json` has."""
        bucket = run.get("bucket")
        if bucket:
            return cls(str(bucket["url"]), dict(bucket["variables"]))
        return cls(str(run["checkpoints"]))

    def to_json(self) -> dict[str, Any]:
        """The location as `run.json` has it."""
        return {"url": self.text, "variables": dict(self.variables)}


def bucket_of(job: TrainingJob) -> CheckpointLocation | None:
    """The job's folder in its bucket, the same as on a cluster; None if it has none."""
    checkpoints = job.spec.checkpoints
    if checkpoints is None or checkpoints.bucket is None:
        return None
    given = {CHECKPOINTS_ENDPOINT: checkpoints.endpoint, CHECKPOINTS_REGION: checkpoints.region}
    variables = {name: value for name, value in given.items() if value is not None}
    return CheckpointLocation(f"{checkpoints.bucket}/{job.checkpoint_folder}", variables)


def location_of(root: Path) -> CheckpointLocation:
    """Where the checkpoints of a run folder are; a folder that is no run folder counts as one of
    checkpoints.
    """
    run = read_json(root / "run.json")
    if run and run.get("checkpoints"):
        return CheckpointLocation.of_run(run)
    return CheckpointLocation(str(root))


def folder_of(root: Path) -> Path:
    """The folder of the checkpoints of a run folder, or of the copy of their records."""
    run = read_json(root / "run.json")
    return Path(str(run["checkpoints"])) if run and run.get("checkpoints") else root

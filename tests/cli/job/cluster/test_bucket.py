"""What the commands say of a job in the cluster whose checkpoints are in a bucket."""

from __future__ import annotations

from kdist.job.cluster import checkpoints, logs
from tests.cli.job.cluster import jobs

BUCKET = "url: 's3://bucket/runs'"


def test_its_checkpoints_and_logs_outlive_the_pods() -> None:
    target = jobs.target(checkpoints=BUCKET)
    assert checkpoints.has_checkpoints(target)
    assert logs.are_kept(target)

"""The checkpoints of a job in the cluster."""

from __future__ import annotations

import pytest

from kdist.errors import KdistError
from kdist.job.cluster import checkpoints
from tests.cli.job.cluster import jobs


def test_a_job_without_checkpoints_in_the_cluster_has_none_to_show() -> None:
    target = jobs.target()
    bare = target.job.model_copy(
        update={"spec": target.job.spec.model_copy(update={"checkpoints": None})}
    )
    with pytest.raises(KdistError, match="has no checkpoints in the cluster"):
        checkpoints.run_tool(
            type(target)(target.cluster, {}, bare, target.backend, target.placement),
            "list",
            notify=print,
        )

"""What `--nodes` means, and what of a job that runs is sent again when it is scaled."""

from __future__ import annotations

import json
import re

import pytest

from kdist.errors import KdistError, UsageError
from kdist.job.cluster import applied, review, scale
from tests.cli.job.cluster import jobs


@pytest.mark.parametrize(
    ("now", "asked", "bounds"),
    [
        ("2", "3", (3, 3)),
        ("{min: 1, max: 2}", "3", (1, 3)),
        ("{min: 2, max: 4}", "1", (1, 1)),
        ("{min: 2, max: 4}", "3:8", (3, 8)),
        ("2", "1:2", (1, 2)),
    ],
)
def test_one_number_keeps_an_elastic_job_elastic_where_it_can(
    now: str, asked: str, bounds: tuple[int, int]
) -> None:
    assert scale.parse_nodes(asked, jobs.target(now)) == bounds


@pytest.mark.parametrize("asked", ["", "0", "-1", "x", "2:1", "1:2:3", "1.5", "0:2", "999999"])
def test_anything_else_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="--nodes takes"):
        scale.parse_nodes(asked, jobs.target())


def test_bounds_that_no_job_may_have_are_refused_in_the_jobs_own_words() -> None:
    with pytest.raises(KdistError, match="digits cannot have these nodes"):
        jobs.target().with_nodes(1, 5000)


def test_the_nodes_that_stand_by_stay() -> None:
    wanted = jobs.target("{min: 2, max: 2, standby: 1}").with_nodes(3, 3)
    assert wanted.job.spec.nodes.standby == 1
    (found,) = (one.document for one in jobs.objects(wanted) if one.kind == "Job")
    assert (found["spec"]["completions"], found["spec"]["parallelism"]) == (4, 4)
    assert found["spec"]["successPolicy"] == {"rules": [{"succeededCount": 3}]}


@pytest.mark.parametrize("backend", ["job", "statefulset", "pytorchjob"])
def test_the_agents_of_another_version_are_reported_the_new_nodes_and_nothing_else(
    backend: str,
) -> None:
    before = jobs.target(backend=backend)
    wanted = before.with_nodes(1, 5)
    workload = next(
        one.document for one in jobs.objects(before) if applied.is_workload(before, one)
    )
    workload = json.loads(
        re.sub("digits-train-[0-9a-f]+", "digits-train-0123456789", json.dumps(workload))
    )
    fitted = review.keep_immutable(wanted, jobs.objects(wanted), workload)
    config = next(
        one.document for one in fitted if one.kind == "ConfigMap" and one.name == "digits"
    )
    assert json.loads(config["data"]["nodes.json"]) == {"min": 1, "max": 5}
    assert not [one for one in fitted if "-train-" in one.name], "what they were started with stays"
    assert "digits-train-0123456789" in json.dumps(
        next(one.document for one in fitted if applied.is_workload(wanted, one))
    )
    assert json.loads(config["data"]["job.json"])["spec"]["nodes"] == {"min": 1, "max": 5}
    assert "5" in json.dumps(
        next(one.document for one in fitted if applied.is_workload(wanted, one))["spec"]
    )


def test_the_size_is_reported_in_words() -> None:
    expected = ["1 node", "2 nodes", "1:3 nodes"]
    assert [scale.describe_nodes(*bounds) for bounds in ((1, 1), (2, 2), (1, 3))] == expected

"""The bench as a job on a real cluster: a job file's machines, measured and left as they were; and
a job that demands more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kdist.errors import Code
from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = pytest.mark.e2e


def write(namespace: Namespace, document: dict[str, object]) -> Path:
    path = namespace.home / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.sampled
def test_the_machines_of_a_job_are_measured_and_left_as_they_were(
    namespace: Namespace, job: Job
) -> None:
    file = write(namespace, job(backend="job", nodes=2))
    printed = namespace.kdist(
        "bench", "all_reduce", "-f", str(file), "-e", "256KiB", "--rounds", "5", "-o", "json"
    )
    result = json.loads(printed)
    assert (result["ranks"], result["wrong"], len(set(result["nodes"]))) == (2, 0, 2)
    assert [row["sizeBytes"] for row in result["rows"]] == [1024, 4096, 16384, 65536, 262144]
    assert all(row["busbwBytesPerSecond"] > 0 for row in result["rows"])
    assert namespace.find("jobs") == []
    assert namespace.find("configmaps", "app.kubernetes.io/managed-by=kdist") == []


@pytest.mark.wide
def test_a_job_that_demands_more_than_the_network_gives_ends_and_why_says_how_much_there_was(
    namespace: Namespace, job: Job
) -> None:
    document = job(backend="job", nodes=2)
    document["spec"]["preflight"] = {"allReduce": {"minBusBandwidth": "900T", "size": "64k"}}
    namespace.apply(document)
    namespace.kdist("wait", document["metadata"]["name"], "--timeout", "4m", code=Code.JOB_FAILED)
    reported = namespace.type_kdist("why", document["metadata"]["name"]).stdout
    assert "minBusBandwidth demands 900T" in reported
    assert "nodeSelector" in reported

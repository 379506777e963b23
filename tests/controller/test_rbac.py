"""The chart's rights are enough for what the controller does seldom: the server of these tests
refuses all else, and a test whose controller was refused something fails.
"""

from __future__ import annotations

from typing import Any

import pytest

from kdist.cluster import Cluster
from kdist_controller.agent_poller import AgentPoller, _Turn
from kdist_controller.metrics import Metrics
from kdist_controller.resource import JobKey
from tests.cli.cluster.api import Api
from tests.controller.conftest import JobOf, Stepper, refuse
from tests.controller.kubernetes import OPERATORS, Kubernetes
from tests.controller.rights import right_of
from tests.controller.test_life import change, read

KEY = JobKey("ml", "digits")
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
PENDING: dict[str, Any] = {"phase": "Pending", "containerStatuses": []}
STATES: dict[str, dict[str, Any]] = {
    "silent": {"containerStatuses": [{"name": "trainer", "ready": False, "state": RUNNING}]},
    "fetching": {
        **PENDING,
        "initContainerStatuses": [{"name": "fetch-0", "state": RUNNING}],
    },
    "unscheduled": PENDING,
}


@pytest.mark.parametrize("state", [*STATES, "no ConfigMap"])
def test_a_job_that_does_not_progress_is_diagnosed(
    kubernetes: Kubernetes, connection: Cluster, stepper: Stepper, job: JobOf, api: Api, state: str
) -> None:
    data = [{"url": "https://example.com/data", "mountPath": "/data"}]
    kubernetes.put("TrainingJob", job(data=data))
    stepper.settle()
    for kind, name in kubernetes.names():
        if kind == "Pod":
            kubernetes.put(
                "Pod", {"metadata": {"name": name}, "status": STATES.get(state, PENDING)}
            )
    stepper.settle()
    if state == "no ConfigMap":
        kubernetes.remove("ConfigMap", "digits")
    metrics = Metrics(list, lambda: 0, lambda: 0, list)
    poller = AgentPoller(connection, refuse, metrics=metrics, notify=lambda _: None)
    assert stepper.observed is not None
    assert poller._diagnose(KEY, _Turn(), stepper.observed.resource.document) is not None
    assert ("list", "", "events") in map(right_of, api.asked)


WITH_KUEUE = tuple(each for each in OPERATORS if each != "Workload")


@pytest.mark.parametrize("kubernetes", [Kubernetes(absent=WITH_KUEUE)], indirect=True, ids=[""])
def test_a_job_in_a_queue_is_suspended(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(queue="team"))
    stepper.settle()
    workload = read(kubernetes, "Job")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "controller": True}
    owner["uid"] = workload["metadata"]["uid"]
    kubernetes.put("Workload", {"metadata": {"name": "job-digits", "ownerReferences": [owner]}})
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "spec": {"suspend": False}})
    stepper.settle()
    change(kubernetes, suspend=True)
    stepper.settle()
    assert read(kubernetes, "Workload", "job-digits")["spec"] == {"active": False}

"""`kdist status` and `kdist wait` on a real cluster: numbers of the agents, and the end of work
that cannot end by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.namespace import Namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.sampled
def test_a_statefulset_that_is_done_is_taken_to_zero_pods_and_its_end_is_remembered(
    namespace: Namespace, job: Job
) -> None:
    # long enough to be seen running
    namespace.apply(job(backend="statefulset", train={"epochs": 60}))
    # no terminal: a line for each change, until the end
    lines = namespace.kdist("status", "digits", "-w").splitlines()
    assert lines[-1].startswith("digits: Succeeded")
    assert any(line.startswith("digits: Running") for line in lines)
    namespace.until("the pods are gone", lambda: not namespace.pods("digits"))
    assert namespace.get("statefulset", "digits")["spec"]["replicas"] == 0
    reported = namespace.status("digits")
    assert (reported["phase"], reported["exitRecord"]["outcome"], reported["terminal"]) == (
        "Succeeded",
        "done",
        True,
    )
    assert reported["step"] > 0
    namespace.kdist("wait", "digits", "--timeout", "20s")


@pytest.mark.sampled
@pytest.mark.needs("trainjob")
def test_trainer_takes_the_progress_of_a_trainjob(
    namespace: Namespace, calm: Job, cluster: Mapping[str, str]
) -> None:
    namespace.apply(calm(backend="trainjob", train={"steps": 600}))
    (pod, *_) = namespace.until("a pod is there", lambda: namespace.pods("digits"))
    containers = pod["spec"]["containers"]
    names = {each["name"] for container in containers for each in container.get("env", [])}
    if cluster.get("KDIST_E2E") == "kubeconfig" and "KUBEFLOW_TRAINER_SERVER_URL" not in names:
        pytest.skip("Trainer's feature TrainJobStatus is off")

    def progress() -> dict[str, Any]:
        status = namespace.get("trainjob", "digits").get("status", {})
        found: dict[str, Any] = status.get("trainerStatus")
        return found or {}

    begun = namespace.until("Trainer knows the progress", progress)
    assert begun["progressPercentage"] < 100
    assert begun["estimatedRemainingSeconds"] > 0
    namespace.kdist("wait", "digits", "--timeout", "300s")
    ended = namespace.until(
        "Trainer knows the end",
        lambda: found if (found := progress())["progressPercentage"] == 100 else {},
    )
    values = {each["name"]: float(each["value"]) for each in ended["metrics"]}
    assert values["step"] == namespace.status("digits")["step"]
    assert values["loss"] > 0


@pytest.mark.sampled
def test_a_wait_ends_by_its_time_and_says_what_keeps_the_job(
    namespace: Namespace, job: Job
) -> None:
    namespace.apply(job(backend="job", nodeSelector={"disk": "golden"}, checkpoints=None))
    ended = namespace.type_kdist("wait", "digits", "--timeout", "5s")
    assert ended.returncode == 6
    assert "is Pending and has not reached `done` after 5 s" in ended.stderr
    assert "nodeSelector" in ended.stderr
    assert f"kdist why digits -n {namespace.name}" in ended.stderr
    assert namespace.type_kdist("status", "nothing").returncode == 4
    assert namespace.type_kdist("wait", "nothing", "--for=deleted").returncode == 0

"""Machines with faults: the controller keeps a job from one after its second fault, once for each
further fault, and takes only the job's own pod there away.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdist.recovery import name_marker
from tests.cli.cluster.api import Api, Asked, Reply, refusal
from tests.controller.conftest import JobOf, Stepper
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import change, condition, pods, read

MARKER = name_marker("digits", "node-1")


def report(kubernetes: Kubernetes, faults: int, machine: str = "node-1") -> None:
    """What an agent says of a machine."""
    fault = {"machine": machine, "faults": faults, "cause": "gpu", "message": "Xid 79", "time": 1.0}
    known = kubernetes.reports.setdefault("digits-0", {"state": "running", "machine_faults": []})
    others = [each for each in known["machine_faults"] if each["machine"] != machine]
    known["machine_faults"] = [*others, fault]


def events(kubernetes: Kubernetes, reason: str) -> list[str]:
    found = [each for each in kubernetes.list_all()["Event"] if each["reason"] == reason]
    return [each["message"] for each in found]


@pytest.fixture
def running(kubernetes: Kubernetes, stepper: Stepper, job: JobOf) -> None:
    """A job that runs on node-0 to node-3, with a pod of somebody else on node-1."""
    kubernetes.put("TrainingJob", job())
    stepper.settle()
    other: dict[str, Any] = {"metadata": {"name": "other"}, "spec": {"nodeName": "node-1"}}
    kubernetes.put("Pod", {**other, "status": {"phase": "Running"}})
    report(kubernetes, 1)
    stepper.settle()
    assert condition(kubernetes, "NodesAvoided") == ("", "")


@pytest.mark.usefixtures("running")
def test_a_machine_is_avoided_after_its_second_fault_and_only_the_job_s_pod_leaves_it(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    report(kubernetes, 2)
    stepper.settle()
    assert pods(kubernetes) == {"digits-0", "digits-2", "digits-3", "other", f"{MARKER}-0"}
    spec = read(kubernetes, "Job", MARKER)["spec"]
    assert 86_390 <= spec["activeDeadlineSeconds"] <= 86_400
    assert spec["template"]["spec"]["nodeName"] == "node-1"
    (owner,) = read(kubernetes, "Job", MARKER)["metadata"]["ownerReferences"]
    assert owner["uid"] == read(kubernetes, "TrainingJob")["metadata"]["uid"]
    assert condition(kubernetes, "NodesAvoided") == ("True", "node-1")
    told = read(kubernetes, "TrainingJob")["status"]["avoidedNodes"]
    assert told == events(kubernetes, "NodeAvoided")
    assert told[0].startswith("node-1 until 2")
    assert told[0].endswith(": 2 faults, last gpu: Xid 79")
    kubernetes.writes.clear()
    stepper.settle()
    assert kubernetes.writes == [], "it is done once"


@pytest.mark.usefixtures("running")
def test_a_machine_that_is_used_again_takes_another_fault(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    report(kubernetes, 2)
    stepper.settle()
    kubernetes.remove("Job", MARKER)  # its time is over, or a person allows it
    kubernetes.writes.clear()
    stepper.settle()
    assert condition(kubernetes, "NodesAvoided") == ("False", "")
    assert "avoidedNodes" not in read(kubernetes, "TrainingJob")["status"]
    assert {kind for _, kind, _ in kubernetes.writes} == {"TrainingJob"}
    kubernetes.put("Node", {"metadata": {"name": "node-1"}}, "")
    report(kubernetes, 3)
    stepper.settle()
    assert condition(kubernetes, "NodesAvoided")[0] == "True"


@pytest.mark.usefixtures("running")
def test_faults_on_all_machines_are_not_theirs(kubernetes: Kubernetes, stepper: Stepper) -> None:
    for number in range(20):
        kubernetes.put("Node", {"metadata": {"name": f"machine-{number}"}}, "")
        report(kubernetes, 2, f"machine-{number}")
    stepper.settle()
    markers = [name for kind, name in kubernetes.names() if kind == "Job" and "-avoid-" in name]
    assert len(markers) == 8


@pytest.mark.usefixtures("running")
def test_a_marker_that_is_refused_is_an_event_and_no_trouble_of_the_job(
    api: Api, kubernetes: Kubernetes, stepper: Stepper
) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.method == "POST" and asked.path.endswith("/jobs"):
            return refusal(403, "exceeded quota: jobs", "Forbidden")
        return kubernetes(asked)

    api.answer = answer
    report(kubernetes, 2)
    stepper.settle()
    (told,) = events(kubernetes, "NodeNotAvoided")
    assert "node-1 is not avoided (2 faults, last gpu: Xid 79)" in told
    assert "exceeded quota" in told
    assert "digits-1" in pods(kubernetes), "it could come back there"
    assert read(kubernetes, "TrainingJob")["status"]["phase"] == "Running"


@pytest.mark.usefixtures("running")
def test_pods_of_an_earlier_version_which_would_come_back_stay(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    for name in pods(kubernetes):
        kubernetes.put("Pod", {"metadata": {"name": name}, "spec": {"affinity": None}})
    report(kubernetes, 2)
    stepper.settle()
    assert ("Job", MARKER) not in kubernetes.names()
    assert "digits-1" in pods(kubernetes)
    (told,) = events(kubernetes, "NodeNotAvoided")
    assert "digits has no pod that would stay away from node-1" in told


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    "rubbish", ["x", [1], [{}], [{"machine": "", "faults": 9}], [{"machine": 4}]]
)
def test_rubbish_of_an_agent_is_nothing(
    rubbish: object, kubernetes: Kubernetes, stepper: Stepper
) -> None:
    kubernetes.reports["digits-0"]["machine_faults"] = json.loads(json.dumps(rubbish))
    stepper.settle()
    assert not [name for kind, name in kubernetes.names() if "-avoid-" in name]
    change(kubernetes, suspend=True)
    stepper.settle()

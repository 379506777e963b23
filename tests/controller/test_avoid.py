"""Machines with faults: the controller keeps a job from one after its second fault, once for each
further fault, and takes only the job's own pod there away.
"""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest

from kdist.cluster import Cluster
from kdist.manifest import OWNER
from kdist.recovery import avoidance
from kdist.recovery.avoidance import name_marker
from kdist.status import AVOIDED
from kdist_controller import node_recovery
from kdist_controller.cache import Cache, trim
from kdist_controller.controller import Controller
from kdist_controller.node_recovery import NodeRecovery
from kdist_controller.observation import Observed
from kdist_controller.resource import JobKey, Resource
from kdist_controller.status import format_time
from tests.cli.cluster.api import Api, Asked, Reply, refusal
from tests.controller.conftest import JobOf, Stepper, refuse
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import END, change, condition, pods, read

KEY = JobKey("ml", "digits")
OLD = {"node-1": 5, "node-9": 4}
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
    pod = kubernetes.find("Pod", "digits-1")
    stepper.settle()
    kubernetes.remove("Job", MARKER)  # its time is over, or a person allows it
    kubernetes.writes.clear()
    stepper.settle()
    assert condition(kubernetes, "NodesAvoided") == ("False", "")
    assert "avoidedNodes" not in read(kubernetes, "TrainingJob")["status"]
    assert {kind for _, kind, _ in kubernetes.writes} == {"TrainingJob"}
    assert pod is not None
    kubernetes.put("Pod", pod)
    stepper.settle()
    assert condition(kubernetes, "NodesAvoided") == ("False", "")
    report(kubernetes, 3)
    stepper.settle()
    assert condition(kubernetes, "NodesAvoided")[0] == "True"


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("faults", [1, 2])
def test_the_faults_of_an_earlier_run_do_not_count_for_this_one(
    faults: int, kubernetes: Kubernetes, stepper: Stepper
) -> None:
    kubernetes.put("TrainingJob", {"metadata": {"name": "digits"}, "status": {"nodeFaults": OLD}})
    report(kubernetes, faults)
    stepper.settle()
    known = read(kubernetes, "TrainingJob")["status"]
    assert known["nodeFaults"] == {"node-9": 4, "node-1": 0 if faults == 1 else 2}
    assert ("avoidedNodes" in known) == (faults == 2)


def markers(kubernetes: Kubernetes) -> list[str]:
    return [name for kind, name in kubernetes.names() if kind == "Job" and "-avoid-" in name]


def test_faults_on_all_machines_are_not_theirs(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(nodes={"min": 1, "max": 20}))
    stepper.settle()
    for number in range(20):
        report(kubernetes, 2, f"node-{number}")
    stepper.settle()
    assert len(markers(kubernetes)) == 8


@pytest.mark.usefixtures("running")
def test_the_next_leader_knows_the_nodes_with_faults_that_the_job_has_left(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    kubernetes.remove("Pod", "digits-1")
    report(kubernetes, 2)
    kubernetes.put("Node", {"metadata": {"name": "node-1"}}, "")
    stepper.settle()  # each time by a new one
    assert markers(kubernetes) == [MARKER]


@pytest.mark.usefixtures("running")
def test_a_pod_chooses_no_node_on_which_none_of_its_job_was(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    kubernetes.put("Node", {"metadata": {"name": "machine"}}, "")
    report(kubernetes, 9, "machine")
    stepper.settle()
    assert markers(kubernetes) == []
    assert events(kubernetes, "NodeNotAvoided") == []


def test_what_is_known_of_a_job_is_bounded_and_forgotten_with_it(
    kubernetes: Kubernetes, connection: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache()
    recovery = NodeRecovery(connection, cache, refuse, leads=lambda: True, notify=print)
    monkeypatch.setattr(node_recovery, "_MOST_SEEN", 3)
    resource = {"metadata": {"name": "digits", "namespace": "ml", "uid": "1"}}
    for number in range(9):
        pod = {"metadata": {"name": "digits-0"}, "spec": {"nodeName": f"node-{number}"}}
        recovery.plan(Observed(Resource(resource), pods=[pod]))
        for known in recovery._machines.values():
            known.refused |= {f"node-{number}": 2}
    (known,) = recovery._machines.values()
    assert list(known.seen) == ["node-6", "node-7", "node-8"]
    assert len(known.refused) <= 3
    recovery.forget(JobKey("ml", "digits"))
    assert recovery._machines == {}


@pytest.mark.usefixtures("running")
def test_a_pod_that_the_scheduler_puts_next_to_the_marker_stays_and_is_told_once(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    report(kubernetes, 2)
    pod = kubernetes.find("Pod", "digits-1")
    assert pod is not None
    stepper.settle()
    pod["metadata"] |= {"creationTimestamp": "2026-01-01T00:00:01Z", "uid": "younger"}
    kubernetes.put("Pod", pod)
    for _ in range(2):
        stepper.settle()
    assert "digits-1" in pods(kubernetes)
    (told,) = events(kubernetes, "NodeNotAvoided")
    assert "digits-1 came to node-1 after that was marked" in told


@pytest.mark.usefixtures("running")
def test_a_marker_without_its_pod_avoids_nothing_and_is_tried_again(
    kubernetes: Kubernetes, stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(avoidance, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(kubernetes, "_control", lambda *_: None)  # a quota
    report(kubernetes, 2)
    stepper.settle()
    assert ("Job", MARKER) in kubernetes.names()
    assert "digits-1" in pods(kubernetes)
    assert "avoidedNodes" not in read(kubernetes, "TrainingJob")["status"]
    (told,) = events(kubernetes, "NodeNotAvoided")
    assert "has made no pod" in told
    monkeypatch.undo()
    kubernetes.put("Job", {"metadata": {"name": MARKER}, "status": {"active": 1}})
    stepper.settle()
    assert "digits-1" not in pods(kubernetes)
    assert condition(kubernetes, "NodesAvoided") == ("True", "node-1")


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("status", "again"), [(403, False), (422, False), (409, True), (429, True), (500, True)]
)
def test_only_what_cannot_pass_is_not_tried_again(
    status: int,
    again: bool,
    api: Api,
    kubernetes: Kubernetes,
    connection: Cluster,
    stepper: Stepper,
) -> None:
    refused = []

    def answer(asked: Asked) -> Reply:
        if asked.method == "POST" and asked.path.endswith("/jobs"):
            refused.append(asked)
            return refusal(status, "no", "Refused")
        return kubernetes(asked)

    stepper.settle()
    report(kubernetes, 2)
    api.answer = answer
    recovery = stepper.settle()
    assert refused
    assert (recovery.avoid_nodes(KEY) is not None) == again
    api.answer = kubernetes
    recovery.avoid_nodes(KEY)
    assert bool(markers(kubernetes)) == again


@pytest.mark.usefixtures("running")
def test_a_job_that_has_ended_avoids_nodes_no_longer_than_its_markers_exist(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    report(kubernetes, 2)
    stepper.settle()
    end = END | {"lastTransitionTime": format_time(time.time())}
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "status": {"conditions": [end]}})
    kubernetes.remove("Pod", "digits-0")
    stepper.settle()
    kubernetes.remove("Job", "digits")
    stepper.settle()
    assert condition(kubernetes, "NodesAvoided")[0] == "True"
    controller = Controller(stepper.connection, None, refuse, ())  # type: ignore[arg-type]
    controller._cache.put(trim(read(kubernetes, "TrainingJob")))
    assert controller._avoided() == []
    kubernetes.remove("Job", MARKER)
    stepper.settle()
    assert condition(kubernetes, "Complete")[0] == "True"
    assert condition(kubernetes, "NodesAvoided") == ("False", "")
    assert "avoidedNodes" not in read(kubernetes, "TrainingJob")["status"]


@pytest.mark.usefixtures("running")
def test_more_markers_than_a_status_takes_do_not_block_it(
    kubernetes: Kubernetes, stepper: Stepper
) -> None:
    report(kubernetes, 2)
    stepper.settle()
    for number in range(70):
        other = copy.deepcopy(read(kubernetes, "Job", MARKER))
        name = f"copy-{number}"
        other["metadata"] |= {"name": name, "uid": name}
        wanted = {"node": f"other-{number}", "until": 1e9, "faults": 10**30}
        other["metadata"]["annotations"] = {
            AVOIDED: json.dumps(wanted),
            OWNER: f"digits/job/{name}",
        }
        kubernetes.put("Job", other)
    stepper.settle()
    status = read(kubernetes, "TrainingJob")["status"]
    assert len(status["avoidedNodes"]) == len(status["nodeFaults"]) == 64
    assert max(status["nodeFaults"].values()) == 1_000_000


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

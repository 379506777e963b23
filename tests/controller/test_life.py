"""The life of a TrainingJob: made, scaled, suspended, restarted, ended and deleted."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from kdist.deploy import make_plan
from kdist.diagnose import Diagnosis
from kdist.job_file import load_text
from kdist_controller.agent_poller import AgentPoller
from kdist_controller.status import format_time
from tests.controller.conftest import JobOf, Stepper
from tests.controller.kubernetes import Kubernetes

Document = dict[str, Any]
END = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}


def read(kubernetes: Kubernetes, kind: str, name: str = "digits") -> Document:
    """An object that exists."""
    found = kubernetes.find(kind, name)
    assert found is not None, f"there is no {kind} {name}: {sorted(kubernetes.names())}"
    return found


def condition(kubernetes: Kubernetes, kind: str) -> tuple[str, str]:
    """(Status, message) of a condition of the job."""
    status = read(kubernetes, "TrainingJob").get("status") or {}
    for each in status.get("conditions") or []:
        if each["type"] == kind:
            return each["status"], each["message"]
    return "", ""


def pods(kubernetes: Kubernetes) -> set[str]:
    """Names of all pods."""
    return {name for kind, name in kubernetes.names() if kind == "Pod"}


@pytest.fixture
def running(kubernetes: Kubernetes, stepper: Stepper, job: JobOf) -> Document:
    """A job that runs; the TrainingJob as it was sent."""
    kubernetes.put("TrainingJob", job())
    stepper.settle()
    return job()


def change(kubernetes: Kubernetes, **spec: Any) -> None:
    """Change the TrainingJob as `kubectl patch` does."""
    kubernetes.put("TrainingJob", {"metadata": {"name": "digits"}, "spec": spec})


def test_a_trainingjob_becomes_the_objects_that_apply_makes(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    sent = job(checkpoints={"size": "1Gi"})
    kubernetes.put("TrainingJob", sent)
    stepper.settle()
    uid = read(kubernetes, "TrainingJob")["metadata"]["uid"]
    text = json.dumps({"apiVersion": "kdist.dev/v1alpha1", "kind": "TrainingJob", **sent})
    plan = make_plan(None, load_text(text, source="job.yaml"), base=Path())
    expected = {(each.kind, each.name) for each in plan.manifests}
    there = {("Pod", f"digits-{number}") for number in range(4)} | {("TrainingJob", "digits")}
    assert kubernetes.names() == expected | there
    for kind, name in expected:
        owners = read(kubernetes, kind, name)["metadata"].get("ownerReferences", [])
        kept = kind == "PersistentVolumeClaim"
        assert [owner["uid"] for owner in owners] == ([] if kept else [uid]), (kind, name)


def test_no_object_has_a_finalizer_or_an_annotation_of_the_controller(
    kubernetes: Kubernetes, running: Document
) -> None:
    for kind, name in kubernetes.names():
        metadata = read(kubernetes, kind, name)["metadata"]
        assert "finalizers" not in metadata
        if kind == "TrainingJob":
            assert metadata.get("annotations", {}) == {}


def test_the_status_says_what_was_decided_and_is_written_only_on_change(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    status = read(kubernetes, "TrainingJob")["status"]
    assert (status["backend"], status["rendezvous"]) == ("job", "kubernetes")
    assert status["observedGeneration"] == 1
    assert status["nodes"] == "4/4"
    assert condition(kubernetes, "Accepted")[0] == "True"
    kubernetes.writes.clear()
    stepper.settle()
    assert kubernetes.writes == []


def test_the_run_stays_what_it_was(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    before = read(kubernetes, "TrainingJob")["status"]["runId"]
    change(kubernetes, restartedAt="2026-05-01T12:00:00Z", image="registry.example.com/other:2")
    stepper.settle()
    annotations = read(kubernetes, "ConfigMap")["metadata"]["annotations"]
    assert annotations["kdist.dev/run-id"] == before


def test_a_job_that_validate_refuses_gets_its_words_and_no_objects(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(nodes={"min": 3, "max": 2}, colour="red"))
    stepper.settle()
    state, words = condition(kubernetes, "Accepted")
    assert state == "False"
    assert "spec.colour" in words
    assert kubernetes.names() == {("TrainingJob", "digits")}


def test_a_running_job_survives_a_change_that_is_refused(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    before = kubernetes.names()
    change(kubernetes, nodes={"min": 9, "max": 2})
    stepper.settle()
    assert condition(kubernetes, "Accepted")[0] == "False"
    assert kubernetes.names() == before


def test_code_of_a_folder_is_refused_with_the_way_out(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(code="./src"))
    stepper.settle()
    state, words = condition(kubernetes, "Accepted")
    assert state == "False"
    assert "configMap" in words


def test_a_job_that_was_sent_without_a_trainingjob_is_left_alone(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    annotations = {"kdist.dev/owner": "digits/configmap/digits"}
    labels = {"kdist.dev/job": "digits"}
    metadata = {"name": "digits", "annotations": annotations, "labels": labels}
    kubernetes.put("ConfigMap", {"metadata": metadata, "data": {"job.json": "{}"}})
    kubernetes.put("TrainingJob", job())
    before = read(kubernetes, "ConfigMap")
    stepper.settle()
    state, words = condition(kubernetes, "Accepted")
    assert state == "False"
    assert "kdist delete digits" in words
    assert read(kubernetes, "ConfigMap") == before


def test_more_nodes_come_without_a_restart_once_the_agents_know_the_limits(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    kubernetes.reports = {f"digits-{number}": _report(1, 4) for number in range(4)}
    change(kubernetes, nodes={"min": 1, "max": 6})
    stepper.settle()
    assert len(pods(kubernetes)) == 4
    assert json.loads(read(kubernetes, "ConfigMap")["data"]["nodes.json"])["max"] == 6
    kubernetes.reports = {f"digits-{number}": _report(1, 6) for number in range(4)}
    workload = read(kubernetes, "Job")["metadata"]["uid"]
    stepper.settle()
    assert len(pods(kubernetes)) == 6
    assert read(kubernetes, "Job")["metadata"]["uid"] == workload
    assert condition(kubernetes, "Outdated")[0] == "False"


def _report(least: int, most: int) -> Document:
    return {"state": "running", "nodes": {"min": least, "max": most}, "generation": 1}


def test_kubectl_scale_changes_the_number_of_nodes(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    change(kubernetes, replicas=2)
    stepper.settle()
    assert pods(kubernetes) == {"digits-0", "digits-1"}
    assert read(kubernetes, "TrainingJob")["status"]["replicas"] == 2


def test_what_needs_new_pods_waits_for_a_restart_and_says_so(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    workload = read(kubernetes, "Job")
    change(kubernetes, image="registry.example.com/kdist-trainer:2")
    stepper.settle()
    state, words = condition(kubernetes, "Outdated")
    assert state == "True"
    assert "kdist-trainer:1 → registry.example.com/kdist-trainer:2" in words
    assert read(kubernetes, "Job") == workload
    change(kubernetes, restartedAt="2026-05-01T12:00:00Z")
    stepper.settle()
    assert condition(kubernetes, "Outdated")[0] == "False"
    replaced = read(kubernetes, "Job")
    assert replaced["metadata"]["uid"] != workload["metadata"]["uid"]
    container = replaced["spec"]["template"]["spec"]["containers"][0]
    assert container["image"].endswith(":2")


@pytest.mark.parametrize("kubernetes", [Kubernetes(absent=())], indirect=True, ids=["operators"])
def test_a_restart_creates_the_runtime_of_a_trainjob_again_if_it_differs(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(backend="trainjob"))
    stepper.settle()
    before = read(kubernetes, "TrainingRuntime")
    moments = (f"2026-05-0{day}T12:00:00Z" for day in range(1, 9))
    change(kubernetes, restartedAt=next(moments))
    stepper.settle()
    assert read(kubernetes, "TrainingRuntime")["metadata"]["uid"] == before["metadata"]["uid"]
    change(kubernetes, image="registry.example.com/kdist-trainer:2", restartedAt=next(moments))
    stepper.settle()
    after = read(kubernetes, "TrainingRuntime")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert "kdist-trainer:2" in json.dumps(after["spec"])
    assert kubernetes.find("TrainJob", "digits")


def test_a_restart_saves_first_and_is_done_once(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    kubernetes.writes.clear()
    change(kubernetes, restartedAt="2026-05-01T12:00:00Z")
    stepper.settle()
    on_job = [method for method, kind, _ in kubernetes.writes if kind == "Job"]
    assert on_job == ["PATCH", "DELETE", "PATCH"]  # suspended, deleted, made again
    kubernetes.writes.clear()
    stepper.settle()
    assert kubernetes.writes == []
    assert len(pods(kubernetes)) == 4


def test_a_suspended_job_keeps_its_objects_and_comes_back(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    change(kubernetes, suspend=True)
    stepper.settle()
    assert pods(kubernetes) == set()
    assert condition(kubernetes, "Suspended")[0] == "True"
    assert "kdist.dev/asked" in read(kubernetes, "ConfigMap")["metadata"]["annotations"]
    change(kubernetes, suspend=False)
    stepper.settle()
    assert len(pods(kubernetes)) == 4
    assert condition(kubernetes, "Suspended")[0] == "False"
    assert "kdist.dev/asked" not in read(kubernetes, "ConfigMap")["metadata"]["annotations"]


def test_a_job_may_be_made_suspended(kubernetes: Kubernetes, stepper: Stepper, job: JobOf) -> None:
    kubernetes.put("TrainingJob", job(suspend=True))
    stepper.settle()
    assert pods(kubernetes) == set()
    assert condition(kubernetes, "Suspended")[0] == "True"


@pytest.mark.parametrize("kind", ["Service", "Role", "NetworkPolicy", "ConfigMap", "Job"])
def test_an_object_that_somebody_deletes_is_made_again(
    kind: str, kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    before = kubernetes.names()
    kubernetes.remove(kind, "digits")
    stepper.settle()
    assert kubernetes.names() == before


def test_a_job_that_has_ended_stays_ended_when_its_workload_is_deleted(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    end = END | {"lastTransitionTime": format_time(time.time())}
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "status": {"conditions": [end]}})
    stepper.settle()
    assert condition(kubernetes, "Complete")[0] == "True"
    kubernetes.remove("Job", "digits")
    stepper.settle()
    assert condition(kubernetes, "Complete")[0] == "True"
    assert kubernetes.names() == {("TrainingJob", "digits"), ("ConfigMap", "digits")}


def test_the_message_of_the_end_is_not_what_was_seen_while_the_job_waited(
    kubernetes: Kubernetes,
    stepper: Stepper,
    running: Document,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = Diagnosis("starting", "digits starts again: Completed", "waiting")
    monkeypatch.setattr(AgentPoller, "diagnosis", lambda *_: earlier)
    end = END | {"lastTransitionTime": format_time(time.time())}
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "status": {"conditions": [end]}})
    stepper.settle()
    assert condition(kubernetes, "Complete") == ("True", "digits is done")


def test_an_end_that_nobody_saw_is_read_from_the_rendezvous(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    record = b64encode(b'{"code": 70, "cause": "user_code", "message": "x is 3"}').decode()
    result = {"binaryData": {"kdist_2fr_2frun_5fresult": record}}
    kubernetes.put("ConfigMap", {"metadata": {"name": "digits-rendezvous"}, **result})
    kubernetes.remove("Job", "digits")
    stepper.settle()
    assert ("Job", "digits") not in kubernetes.names()
    assert condition(kubernetes, "Failed")[0] == "True"


def test_a_finished_statefulset_goes_to_zero_and_ends(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(backend="statefulset", nodes=2))
    stepper.settle()
    assert len(pods(kubernetes)) == 2
    record = {"code": 0, "cause": "", "outcome": "done", "message": "", "step": 60}
    answer = {"state": "succeeded", "step": 60, "target_steps": 60, "exit": record}
    kubernetes.reports = {f"digits-{number}": answer for number in range(2)}
    stepper.settle()
    assert pods(kubernetes) == set()
    kubernetes.reports = {}
    stepper.settle()
    assert condition(kubernetes, "Complete")[0] == "True"


def test_a_statefulset_whose_data_cannot_be_fetched_fails(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    data = [{"url": "https://example.com/set.tar", "mountPath": "/data"}]
    kubernetes.put("TrainingJob", job(backend="statefulset", nodes=1, data=data))
    stepper.settle()
    wrong = {"code": 65, "cause": "data", "outcome": "failed", "message": "spec.data[0]: 404"}
    end = {"exitCode": 65, "reason": "Error", "message": json.dumps(wrong)}
    init = {"name": "fetch-data-0", "state": {"terminated": end}, "restartCount": 0}
    status = {"phase": "Pending", "initContainerStatuses": [init], "containerStatuses": []}
    kubernetes.put("Pod", {"metadata": {"name": "digits-0"}, "status": status})
    stepper.settle()
    assert pods(kubernetes) == set()
    assert condition(kubernetes, "Failed")[0] == "True"


def test_a_workload_that_outlives_its_time_to_live_is_deleted(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "status": {"conditions": [END]}})
    stepper.settle()  # the end was in January
    assert ("Job", "digits") not in kubernetes.names()
    assert condition(kubernetes, "Complete")[0] == "True"


def test_the_objects_of_a_deleted_job_go_with_it(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job(checkpoints={"size": "1Gi"}))
    stepper.settle()
    kubernetes.remove("TrainingJob", "digits")
    stepper.settle()
    assert kubernetes.names() == {("PersistentVolumeClaim", "digits-checkpoints")}


def test_a_claim_goes_where_the_job_says_so(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    claim = {"size": "1Gi", "reclaimPolicy": "Delete"}
    kubernetes.put("TrainingJob", job(checkpoints=claim))
    stepper.settle()
    kubernetes.remove("TrainingJob", "digits")
    assert kubernetes.names() == set()


def test_labels_of_gitops_tools_stay_with_the_trainingjob(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    labels = {"team": "vision", "kustomize.toolkit.fluxcd.io/name": "apps"}
    annotations = {
        "argocd.argoproj.io/tracking-id": "apps",
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
        "kdist.dev/commit": "1f2e",
    }
    metadata = {"name": "digits", "labels": labels, "annotations": annotations}
    kubernetes.put("TrainingJob", {**job(), "metadata": metadata})
    stepper.settle()
    found = read(kubernetes, "Job")["metadata"]
    assert found["labels"]["team"] == "vision"
    assert not {*labels, *annotations} - {"team"} & {*found["labels"], *found["annotations"]}


def test_tools_that_know_no_trainingjobs_see_what_is_under_way_and_what_is_stuck(
    kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("TrainingJob", job())
    stepper.settle()
    assert condition(kubernetes, "Stalled") == ("", "")
    assert condition(kubernetes, "Reconciling")[0] in ("", "False")
    change(kubernetes, nodes={"min": 5, "max": 2})
    stepper.settle()
    stalled, why = condition(kubernetes, "Stalled")
    assert (stalled, why) == ("True", condition(kubernetes, "Accepted")[1])
    change(kubernetes, nodes={"min": 1, "max": 2})
    stepper.settle()
    assert condition(kubernetes, "Stalled")[0] == "False"

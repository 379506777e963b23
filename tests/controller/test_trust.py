"""What others write into the job's objects: no document changes what is made or where, and what is
not the job's own completes, fails, blocks or deletes nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from kdist.manifest import mark
from tests.controller.conftest import JobOf, Stepper
from tests.controller.kubernetes import Kubernetes
from tests.controller.test_life import END, change, condition, pods, read, running

__all__ = ["running"]

Document = dict[str, Any]
LABELS = {"kdist.dev/job": "digits", "app.kubernetes.io/managed-by": "kdist"}
ROOT: Document = {
    "spec": {"hostPID": True, "nodeSelector": {"node-role.kubernetes.io/control-plane": ""}}
}


def elsewhere(document: Document) -> None:
    document["metadata"]["namespace"] = "kube-system"


def renamed(document: Document) -> None:
    document["metadata"]["name"] = "coredns"


def privileged(document: Document) -> None:
    document["spec"]["podTemplate"] = ROOT


def all_of_it(document: Document) -> None:
    for change_it in (elsewhere, renamed, privileged):
        change_it(document)


def another_kind(document: Document) -> None:
    document["spec"]["backend"] = "statefulset"


def another_claim(document: Document) -> None:
    document["spec"]["checkpoints"] = {"size": "1Ti", "class": "fast"}


LIES: dict[str, Callable[[Document], None]] = {
    each.__name__: each
    for each in (elsewhere, renamed, privileged, all_of_it, another_kind, another_claim)
}
TEXTS = {
    "no JSON": "{",
    "a list": "[]",
    "nothing": "",
    "deep": "[" * 5000,
    "of another version": '{"spec": {"colour": "red"}}',
}


def lie(kubernetes: Kubernetes, how: Callable[[Document], None] | str) -> None:
    """Change `job.json` as somebody who may edit ConfigMaps does."""
    if not isinstance(how, str):
        document = json.loads(read(kubernetes, "ConfigMap")["data"]["job.json"])
        how(document)
        how = json.dumps(document)
    kubernetes.put("ConfigMap", {"metadata": {"name": "digits"}, "data": {"job.json": how}})


def events(kubernetes: Kubernetes, reason: str) -> list[str]:
    """Messages of the events with this reason."""
    return [each["message"] for each in kubernetes.list_all()["Event"] if each["reason"] == reason]


def namespaces(kubernetes: Kubernetes) -> set[str]:
    """Namespaces with objects in them."""
    return {where.namespace for where in kubernetes.objects}


def restart(kubernetes: Kubernetes) -> None:
    change(kubernetes, restartedAt="2026-05-01T12:00:00Z")


def resize(kubernetes: Kubernetes) -> None:
    kubernetes.reports = {}
    change(kubernetes, nodes={"min": 1, "max": 3})


def suspend(kubernetes: Kubernetes) -> None:
    change(kubernetes, suspend=True)


def lose_workload(kubernetes: Kubernetes) -> None:
    kubernetes.remove("Job", "digits")


def lose_service(kubernetes: Kubernetes) -> None:
    kubernetes.remove("Service", "digits")


def end(kubernetes: Kubernetes) -> None:
    kubernetes.put("Job", {"metadata": {"name": "digits"}, "status": {"conditions": [END]}})


def nothing(kubernetes: Kubernetes) -> None:
    """It is only looked at."""


PATHS = (nothing, restart, resize, suspend, lose_workload, lose_service, end)


def made_of(kubernetes: Kubernetes) -> dict[tuple[str, str], Document]:
    """Every object as it is, without what counts and dates it."""
    found = {}
    for kind, name in kubernetes.names():
        if kind in ("TrainingJob", "Pod"):
            continue
        each = read(kubernetes, kind, name)
        found[kind, name] = {key: value for key, value in each.items() if key != "metadata"}
        if (kind, name) == ("ConfigMap", "digits"):  # whether it is suspended, its annotation says
            document = json.loads(each["data"]["job.json"])
            document["spec"].pop("suspend")
            found[kind, name]["data"] = {**each["data"], "job.json": document}
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("how", [*LIES.values(), *TEXTS.values()], ids=[*LIES, *TEXTS])
def test_a_stored_document_changes_nothing_that_is_made(
    kubernetes: Kubernetes,
    stepper: Stepper,
    running: Document,
    how: Callable[[Document], None] | str,
    path: Callable[[Kubernetes], None],
) -> None:
    path(kubernetes)
    stepper.settle()
    expected = made_of(kubernetes)
    kubernetes.clear()
    kubernetes.put("TrainingJob", running)
    stepper.settle()
    lie(kubernetes, how)
    path(kubernetes)
    stepper.settle()
    assert made_of(kubernetes) == expected
    assert namespaces(kubernetes) == {"ml"}
    assert "hostPID" not in json.dumps([*kubernetes.objects.values()])
    if path in (nothing, suspend):
        assert any("ConfigMap digits is not followed" in each for each in told(kubernetes))


def told(kubernetes: Kubernetes) -> list[str]:
    return events(kubernetes, "RecordReplaced")


def test_a_running_job_notices_nothing_of_a_lie_and_its_pods_stay(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    before, workload = made_of(kubernetes), read(kubernetes, "Job")
    lie(kubernetes, all_of_it)
    stepper.settle()
    assert made_of(kubernetes) == before
    assert read(kubernetes, "Job") == workload
    assert condition(kubernetes, "Outdated")[0] == "False"
    (words,) = told(kubernetes)
    assert '"coredns" in namespace "kube-system"' in words
    kubernetes.writes.clear()
    stepper.settle()
    assert kubernetes.writes == []


def test_what_waits_for_a_restart_still_does_after_a_lie(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    workload = read(kubernetes, "Job")
    change(kubernetes, image="registry.example.com/kdist-trainer:2")
    stepper.settle()
    lie(kubernetes, privileged)
    stepper.settle()
    state, words = condition(kubernetes, "Outdated")
    assert (state, "is not known" in words) == ("True", True)
    assert read(kubernetes, "Job") == workload
    restart(kubernetes)
    stepper.settle()
    assert condition(kubernetes, "Outdated")[0] == "False"
    assert "kdist-trainer:2" in json.dumps(read(kubernetes, "Job")["spec"])


def test_a_job_is_scaled_with_the_pods_that_it_has_though_its_spec_is_newer(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    change(kubernetes, image="registry.example.com/kdist-trainer:2")
    stepper.settle()
    template = read(kubernetes, "Job")["spec"]["template"]
    change(kubernetes, replicas=2)
    stepper.settle()
    assert pods(kubernetes) == {"digits-0", "digits-1"}
    assert read(kubernetes, "Job")["spec"]["template"] == template
    state, words = condition(kubernetes, "Outdated")
    assert state == "True"
    assert "kdist-trainer:1 → registry.example.com/kdist-trainer:2" in words


@pytest.mark.parametrize("key", ["kdist.dev/run-id", "kdist.dev/backend", "kdist.dev/rendezvous"])
def test_annotations_decide_neither_the_run_nor_the_kind(
    key: str, kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    before = made_of(kubernetes)
    annotations = {key: "statefulset"}
    kubernetes.put("ConfigMap", {"metadata": {"name": "digits", "annotations": annotations}})
    stepper.settle()
    assert made_of(kubernetes) == before
    found = read(kubernetes, "ConfigMap")["metadata"]["annotations"][key]
    assert found != "statefulset"


def test_the_limits_that_agents_read_are_written_again(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    before = made_of(kubernetes)
    data = {"nodes.json": '{"min": 4096, "max": 4096}'}
    kubernetes.put("ConfigMap", {"metadata": {"name": "digits"}, "data": data})
    stepper.settle()
    assert made_of(kubernetes) == before


def test_labels_and_annotations_of_a_trainingjob_make_it_not_outdated(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    metadata = {"name": "digits", "annotations": {"team": "a"}, "labels": {"cost": "7"}}
    kubernetes.put("TrainingJob", {"metadata": metadata})
    stepper.settle()
    assert condition(kubernetes, "Outdated")[0] == "False"


FOREIGN: Document = {
    "without a mark": {"labels": LABELS},
    "marked as ours": {"labels": LABELS, "annotations": {"kdist.dev/owner": "digits/job/digits"}},
    "of another owner": {
        "labels": LABELS,
        "ownerReferences": [{"kind": "CronJob", "name": "nightly", "uid": "nightly"}],
    },
}


@pytest.mark.parametrize("whose", FOREIGN)
def test_a_foreign_job_that_has_finished_completes_nothing_and_outlives_it(
    whose: str, kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    kubernetes.put("CronJob", {"metadata": {"name": "nightly", "uid": "nightly"}})
    theirs = {
        "metadata": {"name": "digits", **copy.deepcopy(FOREIGN[whose])},
        "spec": {"suspend": True},
        "status": {"conditions": [END]},  # in January: its TTL is over
    }
    before = kubernetes.put("Job", theirs)
    kubernetes.put("TrainingJob", job())
    stepper.settle()
    assert condition(kubernetes, "Complete")[0] in ("", "False")
    state, words = condition(kubernetes, "Accepted")
    assert state == "False"
    assert "Job digits" in words or "job.batch/digits" in words
    restart(kubernetes)
    stepper.settle()
    assert read(kubernetes, "Job") == before
    assert kubernetes.names() - {("CronJob", "nightly")} == {
        ("TrainingJob", "digits"),
        ("Job", "digits"),
    }
    kubernetes.remove("Job", "digits")
    stepper.settle()
    assert condition(kubernetes, "Accepted")[0] == "True"
    assert len(pods(kubernetes)) == 4


KINDS = {
    "ServiceAccount": "digits",
    "Role": "digits",
    "RoleBinding": "digits",
    "Service": "digits",
    "NetworkPolicy": "digits",
    "PodDisruptionBudget": "digits",
    "PersistentVolumeClaim": "digits-checkpoints",
    "ConfigMap": "digits-rendezvous",
    "Job": "digits",
}


@pytest.mark.parametrize("labelled", [False, True], ids=["bare", "labelled"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_that_name_is_named_with_its_owner_and_nothing_is_made(
    kind: str, labelled: bool, kubernetes: Kubernetes, stepper: Stepper, job: JobOf
) -> None:
    name = KINDS[kind]
    theirs = {"name": name, "annotations": {"kdist.dev/owner": mark("other", kind, name)}}
    before = kubernetes.put(kind, {"metadata": {**theirs, "labels": LABELS if labelled else {}}})
    spec = {"min": 2, "max": 4} if kind == "PodDisruptionBudget" else {"min": 1, "max": 4}
    kubernetes.put("TrainingJob", job(checkpoints={"size": "1Gi"}, nodes=spec))
    stepper.settle()
    state, words = condition(kubernetes, "Accepted")
    assert state == "False", words
    assert f"/{name} in namespace ml does not belong to job digits" in words
    assert "it belongs to job other" in words
    assert kubernetes.names() == {("TrainingJob", "digits"), (kind, name)}
    assert read(kubernetes, kind, name) == before
    kubernetes.remove(kind, name)
    stepper.settle()
    assert condition(kubernetes, "Accepted")[0] == "True"
    assert len(pods(kubernetes)) == 4


def test_a_foreign_pod_with_the_label_counts_for_nothing(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    record = {"code": 70, "cause": "user_code", "outcome": "failed", "message": "x is 3"}
    ended = {"exitCode": 70, "reason": "Error", "message": json.dumps(record)}
    state = {"name": "trainer", "state": {"terminated": ended}, "restartCount": 9}
    owners = (("batch/v1", "Job"), ("batch.volcano.sh/v1alpha1", "Job"), ("apps/v1", "Deployment"))
    for number, (api_version, kind) in enumerate(owners):
        reference: Document = {"apiVersion": api_version, "kind": kind, "name": "digits"}
        reference |= {"uid": "theirs", "controller": True}
        metadata = {"name": f"spy-{number}", "labels": LABELS, "ownerReferences": [reference]}
        status = {"phase": "Failed", "containerStatuses": [state]}
        kubernetes.put("Deployment", {"metadata": {"name": "theirs", "uid": "theirs"}})
        kubernetes.put("Pod", {"metadata": metadata, "spec": {}, "status": status})
    before = read(kubernetes, "TrainingJob")["status"]
    stepper.settle()
    after = read(kubernetes, "TrainingJob")["status"]
    assert after["nodes"] == "4/4"
    assert after == before
    suspend(kubernetes)
    stepper.settle()
    assert condition(kubernetes, "Suspended")[0] == "True", "foreign pods keep nobody waiting"
    assert pods(kubernetes) == {"spy-0", "spy-1", "spy-2"}


def test_a_foreign_end_in_the_place_of_the_rendezvous_is_no_end(
    kubernetes: Kubernetes, stepper: Stepper, running: Document
) -> None:
    kubernetes.remove("ConfigMap", "digits-rendezvous")
    theirs = {
        "metadata": {"name": "digits-rendezvous"},
        "binaryData": {"kdist_2fr_2frun_5fresult": "eyJjb2RlIjogMH0="},
    }
    kubernetes.put("ConfigMap", theirs)
    kubernetes.remove("Job", "digits")
    stepper.settle()
    assert condition(kubernetes, "Complete")[0] in ("", "False")
    assert condition(kubernetes, "Accepted")[0] == "False"

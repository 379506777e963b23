"""What a user with the role `edit` of one namespace writes there reaches nothing beyond it, and
what is not a TrainingJob's own neither completes it nor goes with it. The controller has its rights
in the whole cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import Job
from tests.cluster.controller import installed, patch, send, wait_for
from tests.cluster.namespace import Namespace

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.needs("helm", "whole-cluster"),
    pytest.mark.timeout(900),
]

ALICE = "alice"
IDLE: dict[str, Any] = {"nodeSelector": {"kdist.dev/none": "such"}, "checkpoints": None}
ROOT: dict[str, Any] = {
    "spec": {"hostPID": True, "tolerations": [{"operator": "Exists"}], "priorityClassName": "x"}
}
OUTSIDE = "jobs,statefulsets,pods,configmaps,serviceaccounts,roles,rolebindings"


@pytest.fixture
def controller_of_all(namespace: Namespace) -> Iterator[None]:
    """The controller of the chart, for the jobs of all namespaces."""
    with installed(namespace, watchNamespaces=[]):
        yield


def alice(namespace: Namespace, *args: str, stdin: str = "") -> None:
    """What kubectl does as a user with the role `edit` of the namespace."""
    namespace.kubectl("--as", ALICE, *args, stdin=stdin)


def let_in(namespace: Namespace) -> None:
    """Give her the role."""
    binding = ("rolebinding", "alice", "--clusterrole=edit", f"--user={ALICE}")
    namespace.kubectl("create", *binding)


def lie(namespace: Namespace, **changes: Any) -> None:
    """She edits `job.json`: metadata and spec."""
    found = json.loads(namespace.get("configmap", "digits")["data"]["job.json"])
    found["metadata"] |= changes.get("metadata", {})
    found["spec"] |= changes.get("spec", {})
    body = json.dumps({"data": {"job.json": json.dumps(found)}})
    alice(namespace, "patch", "configmap", "digits", "--type=merge", "-p", body)


def list_outside(namespace: Namespace) -> set[str]:
    """Names of the objects of other namespaces."""
    found = namespace.kubectl(
        *("get", OUTSIDE, "-A", "-o"),
        "jsonpath={range .items[*]}{.metadata.namespace}/{.kind}/{.metadata.name}{'\\n'}{end}",
        anywhere=True,
    )
    return {line for line in found.splitlines() if not line.startswith(f"{namespace.name}/")}


def of_the_attack(found: set[str]) -> set[str]:
    return {each for each in found if each.rpartition("/")[2] in ("digits", "coredns-shell")}


def told(namespace: Namespace) -> int:
    """How many lies the events name."""
    events = namespace.find("events")
    return sum(each["reason"] == "RecordReplaced" for each in events)


def has_told(namespace: Namespace, number: int) -> bool:
    return told(namespace) >= number


def is_true(namespace: Namespace) -> bool:
    """Whether `job.json` says what the TrainingJob does."""
    stored = json.loads(namespace.get("configmap", "digits")["data"]["job.json"])
    metadata, spec = stored["metadata"], stored["spec"]
    same = (metadata["name"], metadata["namespace"]) == ("digits", namespace.name)
    return same and (spec["podTemplate"], spec["backend"]) == ({}, "job")


@pytest.mark.usefixtures("controller_of_all")
def test_what_one_namespace_writes_reaches_nothing_beyond_it(
    namespace: Namespace, job: Job, record_property: Callable[[str, object], None]
) -> None:
    let_in(namespace)
    document = job(nodes={"min": 1, "max": 2}, **IDLE)
    send(namespace, document)
    namespace.until("its workload is there", partial(namespace.get, "job", "digits"))
    before = namespace.get("job", "digits")["spec"]["template"]
    lies: list[dict[str, Any]] = [
        {"metadata": {"namespace": "kube-system"}, "spec": {"podTemplate": ROOT}},
        {"metadata": {"name": "coredns-shell"}},
        {"spec": {"podTemplate": ROOT, "serviceAccountName": "default"}},
        {"spec": {"backend": "statefulset"}},
    ]
    for number, each in enumerate(lies, 1):
        lie(namespace, **each)
        namespace.until("the lie is told", partial(has_told, namespace, number), 60)
        namespace.until("the truth is written", partial(is_true, namespace), 60)
    # whatever makes the controller render again
    changes: list[dict[str, Any]] = [{"replicas": 1}, {"suspend": True}, {"suspend": False}]
    for number, change in enumerate(changes):
        lie(namespace, **lies[number])
        patch(namespace, **change)
    lie(namespace, **lies[0])
    alice(namespace, "delete", "serviceaccount", "digits")
    lie(namespace, **lies[0])
    alice(namespace, "delete", "job", "digits")
    namespace.until("its workload is there again", partial(namespace.get, "job", "digits"))
    namespace.until("the truth is written", partial(is_true, namespace), 60)
    found = namespace.get("job", "digits")
    assert found["spec"]["template"]["spec"].get("hostPID") is None
    assert found["spec"]["template"]["spec"]["serviceAccountName"] == "digits"
    assert before["spec"]["containers"][0]["image"] == document["spec"]["image"]
    assert of_the_attack(list_outside(namespace)) == set()
    assert not namespace.get("statefulset", "digits")
    record_property("measured", f"{told(namespace)} lies told, nothing outside {namespace.name}")


def finished_job(namespace: Namespace) -> dict[str, Any]:
    """A Job of hers that ends at once, with the label and the mark of the job `digits`."""
    container = {
        "name": "trainer",
        "image": namespace.environment["KDIST_IMAGE"],
        "command": ["true"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    labels = {"kdist.dev/job": "digits", "app.kubernetes.io/managed-by": "kdist"}
    spec = {
        "restartPolicy": "Never",
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "digits",
            "labels": labels,
            "annotations": {"kdist.dev/owner": "digits/job/digits"},
        },
        "spec": {"template": {"metadata": {"labels": labels}, "spec": spec}},
    }


@pytest.mark.usefixtures("controller_of_all")
def test_a_foreign_job_that_has_finished_completes_no_trainingjob_and_stays(
    namespace: Namespace, job: Job
) -> None:
    let_in(namespace)
    alice(namespace, "create", "-f", "-", stdin=json.dumps(finished_job(namespace)))
    namespace.kubectl("wait", "job/digits", "--for=condition=Complete", "--timeout=120s")
    theirs = namespace.get("job", "digits")["metadata"]["uid"]
    send(namespace, job(ttlSecondsAfterFinished=1, **IDLE))
    wait_for(namespace, "Accepted=False", 60)
    status = namespace.get("trainingjob", "digits")["status"]
    (accepted,) = [each for each in status["conditions"] if each["type"] == "Accepted"]
    assert "Job digits" in accepted["message"]
    patch(namespace, restartedAt="2026-05-01T12:00:00Z")
    end = time.monotonic() + 40  # longer than the TTL and the slack of 30 s
    while time.monotonic() < end:
        found = namespace.get("trainingjob", "digits")["status"]["conditions"]
        assert ("Complete", "True") not in {(each["type"], each["status"]) for each in found}
        assert namespace.get("job", "digits")["metadata"]["uid"] == theirs
        time.sleep(2)
    # the way out that the refusal prints, at the first try
    namespace.kdist("delete", "digits")
    assert not namespace.get("trainingjob", "digits")
    assert not namespace.get("job", "digits")

"""On a real API server, without a kubelet that would undo it: a pod is given up and its name is
free, and the chart's policy lets the controller do this and nothing else to the status of a pod.
"""

from __future__ import annotations

import copy
import secrets
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from kdist import backends, cluster
from kdist.cluster import ApiError, Cluster, Impersonation, resources
from kdist.manifest import JobOwner
from kdist.recovery import PodDecision
from kdist.recovery.replacement import failed_status, replace_pod
from tests.charts.rules import CHART
from tests.charts.test_templates import call, find_program
from tests.cli.cluster.api import write_kubeconfig
from tests.patience import soon
from tests.trainer.rendezvous.control_plane import NAMESPACE, ControlPlane

pytestmark = pytest.mark.e2e  # where the API server is built

CONTROLLER = f"system:serviceaccount:{NAMESPACE}:kdist-controller"
OWNER = "uid-of-the-workload"
Document = dict[str, Any]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        plane.request("POST", accounts, {"metadata": {"name": "default"}})
        yield plane


@pytest.fixture(scope="module")
def connect(
    plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Cluster]:
    """Connect as an administrator, or as somebody else: `connect(CONTROLLER)`."""
    file = tmp_path_factory.mktemp("kubeconfig") / "config"
    authority = b64encode((plane.account / "ca.crt").read_bytes()).decode()
    write_kubeconfig(
        file,
        f"https://127.0.0.1:{plane.port}",
        user={"token": "admin-token"},
        cluster={"certificate-authority-data": authority},
    )

    def make(user: str = "") -> Cluster:
        identity = Impersonation(user) if user else None
        return cluster.connect(file=str(file), impersonation=identity)

    return make


@pytest.fixture
def admin(connect: Callable[..., Cluster]) -> Cluster:
    return connect()


def place(admin: Cluster, *, name: str = "", label: str = "kdist.dev/job") -> Document:
    """A pod of a job that runs on `worker-2`, as its kubelet has reported it."""
    name = name or f"digits-{secrets.token_hex(3)}"
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "uid": OWNER}
    metadata = {
        "name": name,
        "labels": {label: "digits"},
        "ownerReferences": [{**reference, "controller": True}],
    }
    container = {"name": "trainer", "image": "registry/kdist-trainer:1"}
    spec = {"nodeName": "worker-2", "containers": [container], "restartPolicy": "Never"}
    admin.send_create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-01-31T12:00:00Z"}
        for kind in ("PodScheduled", "Ready", "ContainersReady")
    ]
    running = {"running": {"startedAt": "2026-01-31T12:00:00Z"}}
    started = {"name": "trainer", "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}
    status = {
        "phase": "Running",
        "conditions": conditions,
        "podIP": "10.0.0.2",
        "podIPs": [{"ip": "10.0.0.2"}],
        "containerStatuses": [{**started, "state": running}],
    }
    return admin.send_patch("v1", "Pod", name, {"status": status}, subresource="status")


def decision(pod: Document) -> PodDecision:
    metadata = pod["metadata"]
    return PodDecision(
        "NodeLost",
        "node worker-2 is gone",
        recover=True,
        pod=metadata["name"],
        uid=metadata["uid"],
        node="worker-2",
    )


def replace(admin: Cluster, pod: Document, *, backend: str = "job") -> Any:
    return replace_pod(
        admin,
        decision(pod),
        owner=JobOwner(NAMESPACE, "digits", makers=frozenset({OWNER})),
        backend=backends.get(backend),
    )


def find(admin: Cluster, pod: Document) -> Document | None:
    names = {each["metadata"]["name"]: each for each in admin.list("v1", "Pod")}
    return names.get(pod["metadata"]["name"])


def test_a_pod_that_is_given_up_is_failed_by_a_disruption_and_otherwise_as_it_was(
    admin: Cluster,
) -> None:
    pod = place(admin)
    done = replace(admin, pod)
    assert (done.marked, done.deleted, done.changed) == (True, False, False)
    found = find(admin, pod)
    assert found is not None
    assert (found["status"]["phase"], found["status"]["reason"]) == ("Failed", "NodeLost")
    conditions = {each["type"]: each["status"] for each in found["status"]["conditions"]}
    assert conditions == {
        "PodScheduled": "True",
        "Ready": "True",
        "ContainersReady": "True",
        "DisruptionTarget": "True",
    }
    assert found["status"]["containerStatuses"] == pod["status"]["containerStatuses"]
    assert found["spec"] == pod["spec"]
    assert replace(admin, pod).changed, "it has ended, so it is not marked again"


@pytest.mark.parametrize("evicted", [False, True], ids=["running", "evicted"])
def test_the_name_of_a_pod_that_is_given_up_is_free_at_once_where_another_one_needs_it(
    admin: Cluster, evicted: bool
) -> None:
    pod = place(admin)
    if evicted:
        admin.send_delete("v1", "Pod", pod["metadata"]["name"])
        found = find(admin, pod)
        assert found is not None
        assert "deletionTimestamp" in found["metadata"], "nobody is there to end it"
    done = replace(admin, pod, backend="job" if evicted else "statefulset")
    assert (done.marked, done.deleted) == (True, True)
    assert find(admin, pod) is None
    again = place(admin, name=pod["metadata"]["name"])
    assert replace(admin, pod, backend="statefulset").changed, "it is another pod"
    assert find(admin, again) == {**again, "apiVersion": "v1", "kind": "Pod"}


@pytest.fixture(scope="module")
def controller(plane: ControlPlane, connect: Callable[..., Cluster]) -> Cluster:
    """The chart's controller, which may patch `pods/status`, held by the chart's policy."""
    admin = connect()
    args = ("--namespace", NAMESPACE, "--set", "controller.enabled=true")
    shown = ("--show-only", "templates/pod-status-policy.yaml", "--skip-schema-validation")
    done = call(find_program("helm"), "template", "kdist", str(CHART), *args, *shown)
    assert done.returncode == 0, done.stderr

    for document in yaml.safe_load_all(done.stdout):
        resource = resources.plural(document["kind"])
        path = f"/apis/admissionregistration.k8s.io/v1/{resource}"
        plane.request("POST", path, document)
    rbac = "rbac.authorization.k8s.io/v1"
    rules = [{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]
    role = {"apiVersion": rbac, "kind": "Role", "metadata": {"name": "statuses"}, "rules": rules}
    subject = {"kind": "ServiceAccount", "name": "kdist-controller", "namespace": NAMESPACE}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "statuses"}
    binding = {"apiVersion": rbac, "kind": "RoleBinding", "metadata": {"name": "statuses"}}
    admin.send_create(role)
    admin.send_create({**binding, "roleRef": reference, "subjects": [subject]})
    controller = connect(CONTROLLER)
    pod = place(admin)
    assert soon(lambda: refusal(controller, pod, {"status": {"phase": "Unknown"}}), seconds=60)
    return controller


def refusal(controller: Cluster, pod: Document, body: Document) -> str:
    """Why the policy refuses a change of a pod's status; empty if it does not."""
    name = pod["metadata"]["name"]
    try:
        controller.send_patch("v1", "Pod", name, body, subresource="status", dry_run=True)
    except ApiError as error:
        return str(error) if "kdist" in str(error) else ""
    return ""


CHANGES: dict[str, Callable[[Document], object]] = {
    "only marks pods as failed that have not ended": lambda body: body["status"].update(
        phase="Succeeded"
    ),
    "whose node is lost": lambda body: body["status"]["conditions"][-1].update(reason="Preempted"),
    "changes no other condition": lambda body: body["status"]["conditions"][0].update(
        status="False"
    ),
    "changes nothing else of a pod's status": lambda body: body["status"].update(
        podIP="10.0.0.9", podIPs=[{"ip": "10.0.0.9"}]
    ),
    "changes no metadata": lambda body: body.update(metadata={"labels": {"app": "payments"}}),
}


def test_the_controller_may_give_up_a_pod_of_a_training(
    controller: Cluster, admin: Cluster
) -> None:
    pod = place(admin)
    body = failed_status(pod, "node worker-2 is gone")
    controller.send_patch("v1", "Pod", pod["metadata"]["name"], body, subresource="status")
    found = find(admin, pod)
    assert found is not None
    assert found["status"]["phase"] == "Failed"


@pytest.mark.parametrize("words", CHANGES)
def test_the_controller_may_do_nothing_else_to_the_status_of_a_pod(
    controller: Cluster, admin: Cluster, words: str
) -> None:
    pod = place(admin)
    body = copy.deepcopy(failed_status(pod, "node worker-2 is gone"))
    CHANGES[words](body)
    assert words in refusal(controller, pod, body)
    assert refusal(admin, pod, body) == "", "others are not concerned"


def test_the_controller_may_not_remove_a_finalizer_or_part_of_the_status_with_it(
    controller: Cluster, admin: Cluster
) -> None:
    pod = place(admin)
    body = failed_status(pod, "node worker-2 is gone")
    gone = {**body, "status": {**body["status"], "containerStatuses": None}}
    assert "changes nothing else" in refusal(controller, pod, gone)
    freed = {**body, "metadata": {"ownerReferences": None, "labels": None}}
    assert "changes no metadata" in refusal(controller, pod, freed)


def test_the_controller_may_not_touch_the_status_of_a_pod_that_is_no_training_s(
    controller: Cluster, admin: Cluster
) -> None:
    pod = place(admin, label="app")
    body = failed_status(pod, "node worker-2 is gone")
    assert "pods of trainings only" in refusal(controller, pod, body)

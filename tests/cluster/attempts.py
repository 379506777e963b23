"""The attempts of alice, vera and eve to reach beyond what is theirs: one table. `act` of a row
tries it and asserts what it must lead to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.cluster.tenants import ALICE, EVE, VERA, Document, Tenants

HOST = {"volumes": [{"name": "disk", "hostPath": {"path": "/"}}], "hostNetwork": True}
CONTEXT = {
    "privileged": True,
    "allowPrivilegeEscalation": True,
    "runAsUser": 0,
    "runAsNonRoot": False,
}
ROOT = {"name": "trainer", "securityContext": CONTEXT}
LABELS = {
    "kdist.dev/job": "digits",
    "app.kubernetes.io/name": "kdist",
    "app.kubernetes.io/instance": "digits",
    "app.kubernetes.io/managed-by": "kdist",
    "app.kubernetes.io/component": "trainer",
}
PAUSED = {
    "restartPolicy": "Never",
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}


@dataclass(frozen=True)
class Attempt:
    """One row of the table.

    Attributes:
        writer: the row of the boundaries: who writes what is read elsewhere.
        user: who tries.
        description: what is tried.
        act: tries it, and asserts what it must lead to.
    """

    writer: str
    user: str
    description: str
    act: Callable[[Tenants], object]


def intrude(document: Document) -> None:
    """Name another namespace and another job, with a privileged pod."""
    document["metadata"] |= {"namespace": "kube-system", "name": "intruder"}
    document["spec"]["podTemplate"] = {"spec": {**HOST, "containers": [ROOT]}}


def rename(document: Document) -> None:
    """Name another job of the same namespace."""
    document["metadata"]["name"] = "neighbour"


def escalate(document: Document) -> None:
    """Ask for a privileged pod in the job's own namespace."""
    document["spec"]["podTemplate"] = {"spec": {**HOST, "containers": [ROOT]}}


def nest(_: Document) -> str:
    """Not a document, but what exhausts the stack of a careless reader."""
    return "[" * 100_000


def enlarge(document: Document) -> None:
    """Another image and more nodes than the TrainingJob asks for."""
    document["spec"] |= {"image": "example.invalid/intruder:1", "nodes": 64}


STORED = (intrude, rename, escalate, nest, enlarge)


def tamper(change: Callable[[Document], object]) -> Callable[[Tenants], object]:
    """Alice edits the stored job, and has the controller act."""

    def act(tenants: Tenants) -> None:
        tenants.edit_document("digits", "job.json", change)
        tenants.settle()
        expect_honest_pods(tenants)

    return act


def restart_after(change: Callable[[Document], object]) -> Callable[[Tenants], object]:
    """Alice edits the stored job, and asks for new pods."""

    def act(tenants: Tenants) -> None:
        before = {pod["metadata"]["uid"] for pod in tenants.a.pods("digits")}
        tenants.edit_document("digits", "job.json", change)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = json.dumps({"spec": {"restartedAt": now}})
        tenants.a.kubectl("patch", "trainingjob", "digits", "--type=merge", "-p", body)

        def replaced() -> bool:
            pods = tenants.a.pods("digits")
            return bool(pods) and not before & {pod["metadata"]["uid"] for pod in pods}

        tenants.a.until("new pods", replaced)
        expect_honest_pods(tenants)

    return act


def expect_honest_pods(tenants: Tenants) -> None:
    """The job's pods are what the TrainingJob asks for."""
    resource = tenants.a.get("trainingjob", "digits")
    for pod in tenants.a.pods("digits"):
        spec = pod["spec"]
        assert not spec.get("hostNetwork"), pod
        assert not any("hostPath" in volume for volume in spec["volumes"]), pod
        for container in spec["containers"]:
            assert container["image"] == resource["spec"]["image"], pod
            assert not container["securityContext"].get("privileged"), pod


def nodes_json(tenants: Tenants) -> None:
    """Limits of the number of nodes that no one can read."""
    tenants.store("digits", {"nodes.json": "59:59:59"})
    tenants.settle()
    expect_honest_pods(tenants)


def claim_ownership(tenants: Tenants) -> None:
    """The job's ConfigMap names another owner."""
    reference = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "name": "coredns",
        "uid": tenants.a.kubectl(
            *("get", "serviceaccount", "coredns", "-n", "kube-system"),
            *("-o", "jsonpath={.metadata.uid}"),
            anywhere=True,
        ),
    }
    body = json.dumps({"metadata": {"ownerReferences": [reference]}})
    tenants.kubectl(ALICE, "patch", "configmap", "digits", "--type=merge", "-p", body)
    tenants.settle()


def replace_config_map(tenants: Tenants) -> None:
    """A ConfigMap of hers in the place of the job's, with a hostile document: refused by name, and
    right again once it is gone.
    """
    document = json.loads(tenants.a.get("configmap", "digits")["data"]["job.json"])
    intrude(document)
    tenants.kubectl(ALICE, "delete", "configmap", "digits")
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "digits", "labels": LABELS},
        "data": {"job.json": json.dumps(document)},
    }
    done = tenants.kubectl(ALICE, "create", "-f", "-", stdin=json.dumps(foreign))
    if done.returncode != 0:  # the controller was faster: the job's own is there again
        assert "AlreadyExists" in done.stderr or "already exists" in done.stderr, done.stderr
        return
    tenants.settle_refused("digits", "ConfigMap")
    assert "intruder" in tenants.a.get("configmap", "digits")["data"]["job.json"], "not ours"
    tenants.kubectl(ALICE, "delete", "configmap", "digits")
    tenants.settle()


def finished_job(name: str, labels: dict[str, str], *, suspend: bool = False) -> Document:
    """A Job with a job's labels that ends at once, or never begins."""
    container = {
        "name": "trainer",
        "image": "registry.invalid/none",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    template = {"metadata": {"labels": labels}, "spec": {**PAUSED, "containers": [container]}}
    spec = {"template": template, "suspend": suspend, "completions": 0 if not suspend else 1}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def foreign_job(tenants: Tenants) -> None:
    """A finished Job with the job's labels does not end the TrainingJob, nor does it end itself."""
    tenants.create(ALICE, finished_job("impostor", LABELS))
    tenants.a.kubectl("wait", "job/impostor", "--for=condition=Complete", "--timeout=60s")
    uid = tenants.a.get("job", "impostor")["metadata"]["uid"]
    tenants.settle()
    assert tenants.condition("digits", "Complete").get("status") != "True"
    assert tenants.a.get("job", "impostor")["metadata"]["uid"] == uid


def suspended_job(tenants: Tenants) -> None:
    """A suspended Job with the job's labels outlives `restartedAt`."""
    tenants.create(ALICE, finished_job("sleeper", LABELS, suspend=True))
    uid = tenants.a.get("job", "sleeper")["metadata"]["uid"]
    restart_after(rename)(tenants)
    assert tenants.a.get("job", "sleeper")["metadata"]["uid"] == uid


def failed_pod(tenants: Tenants) -> None:
    """A pod with the job's labels that fails for good does not fail the job."""
    container = {
        "name": "trainer",
        "image": tenants.a.environment["KDIST_IMAGE"],
        "command": ["python", "-c", "raise SystemExit(70)"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    metadata = {"name": "digits-9", "labels": LABELS}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    tenants.create(ALICE, {**pod, "spec": {**PAUSED, "containers": [container]}})
    tenants.a.until(
        "the pod has failed",
        lambda: tenants.a.get("pod", "digits-9")["status"].get("phase") == "Failed",
    )
    tenants.settle()
    assert tenants.condition("digits", "Failed").get("status") != "True"
    printed = tenants.a.kdist("status", "digits")
    assert "user_code" not in printed, printed
    assert tenants.a.get("pod", "digits-9"), "a pod that is not the job's is left alone"


def occupy(kind: str, document: Document) -> Callable[[Tenants], object]:
    """An object of hers with the name of one that a new job needs: the job is not accepted, says
    which and whose it is, and deleting the job leaves the object.
    """

    def act(tenants: Tenants) -> None:
        name = document["metadata"]["name"]
        tenants.create(ALICE, document)
        uid = tenants.a.get(kind, name)["metadata"]["uid"]
        resource = tenants.a.get("trainingjob", "digits")
        job = {key: resource[key] for key in ("apiVersion", "kind", "spec")}
        job["metadata"] = {"name": "mnist"}
        job["spec"] = {**job["spec"], "checkpoints": {"size": "1Gi"}}
        tenants.create(ALICE, job)
        tenants.settle_refused("mnist", kind)
        tenants.kubectl(ALICE, "delete", "trainingjob", "mnist", "--timeout=60s")
        assert tenants.a.get(kind, name)["metadata"]["uid"] == uid, "left alone"
        tenants.kubectl(ALICE, "delete", kind, name)

    return act


def plain(api_version: str, kind: str, name: str, **fields: Any) -> Document:
    """An object of this kind with little in it."""
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **fields}


CORE = "/api/v1/namespaces/kube-system"
OCCUPIED = (
    plain("v1", "ServiceAccount", "mnist"),
    plain("v1", "ConfigMap", "mnist", data={"theirs": "yes"}),
    plain("v1", "Service", "mnist", spec={"ports": [{"port": 80}], "selector": {"a": "b"}}),
    plain("batch/v1", "Job", "mnist", spec=finished_job("mnist", {}, suspend=True)["spec"]),
    plain("networking.k8s.io/v1", "NetworkPolicy", "mnist", spec={"podSelector": {}}),
)


def refuse(user: str, *line: str, stdin: str = "") -> Callable[[Tenants], object]:
    """A request that the server refuses to a user."""

    def act(tenants: Tenants) -> None:
        done = tenants.kubectl(user, *line, stdin=stdin)
        assert done.returncode != 0, done.stdout
        assert "orbidden" in done.stderr or "cannot" in done.stderr, done.stderr

    return act


def post_by_proxy(tenants: Tenants) -> None:
    """Vera may send no POST to a pod's port through the API server."""
    pod = tenants.a.pods("digits")[0]["metadata"]["name"]
    path = f"/api/v1/namespaces/{tenants.a.name}/pods/{pod}:9401/proxy/status"
    refuse(VERA, "create", "--raw", path, "-f", "-", stdin="{}")(tenants)


def reach_ports(tenants: Tenants) -> None:
    """Eve's pod gets no answer from what the job's pods listen on for their peers. The exporter
    answers only where the network enforces no policies.
    """
    container = {
        "name": "probe",
        "image": tenants.b.environment["KDIST_IMAGE"],
        "command": ["sleep", "3600"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = plain("v1", "Pod", "probe", spec={**PAUSED, "containers": [container]})
    tenants.create(EVE, pod)
    tenants.b.kubectl("wait", "pod/probe", "--for=condition=Ready", "--timeout=120s")
    target = tenants.a.pods("digits")[0]
    address = target["status"]["podIP"]
    listening = json.loads(
        tenants.a.kubectl("exec", target["metadata"]["name"], "--", "python", "-c", LISTENING)
    )
    assert listening["everywhere"] == [], "nothing listens on all interfaces"
    ports = [f"{address}:{port}" for port in listening["ports"]]
    assert ports, "the exporter listens"
    answered = json.loads(
        tenants.kubectl(EVE, "exec", "probe", "--", "python", "-c", TRY, *ports).stdout
    )
    tenants.kubectl(EVE, "delete", "pod", "probe", "--grace-period=0", "--force")
    assert answered.keys() <= {f"{address}:9401"}, answered


LISTENING = """
import json
from pathlib import Path
rows = [line.split() for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]]
found = [row[1].split(":") for row in rows if row[3] == "0A"]
print(json.dumps({
    "ports": sorted({int(port, 16) for address, port in found}),
    "everywhere": sorted({int(port, 16) for address, port in found if not int(address, 16)}),
}))
"""
TRY = """
import json, socket, sys
def ask(host, port, line):
    try:
        with socket.create_connection((host, int(port)), timeout=3) as connection:
            connection.sendall(line)
            return connection.recv(100).decode("latin-1")
    except OSError:
        return ""
LINES = (b"GET /status HTTP/1.1\\r\\n\\r\\n", b'{"get": ["key"], "seconds": 0}\\n', bytes(64))
found = {each: [ask(*each.rsplit(":", 1), line) for line in LINES] for each in sys.argv[1:]}
print(json.dumps({each: answers for each, answers in found.items() if any(answers)}))
"""


def verb(line: str, change: Callable[[Document], object]) -> Callable[[Tenants], object]:
    """The administrator types a command of kdist after alice has edited what is stored."""

    def act(tenants: Tenants) -> None:
        tenants.edit_document("digits", "job.json", change)
        command, *words = line.split()
        tenants.a.type_kdist(command, "digits", *words)
        tenants.settle()
        expect_honest_pods(tenants)

    return act


VERBS = (
    "scale --nodes=1 --no-wait",
    "suspend --no-wait",
    "resume --no-wait",
    "restart --no-wait",
    "recover --no-wait",
    "profile --steps 1 --timeout 5s",
)

STORED_JOB = tuple(
    Attempt("ConfigMap", ALICE, f"stored job: {change.__name__}", tamper(change))
    for change in STORED
)
NEW_PODS = tuple(
    Attempt("ConfigMap", ALICE, f"new pods after: {change.__name__}", restart_after(change))
    for change in (intrude, escalate)
)
NAMES = tuple(
    Attempt("names", ALICE, f"a {each['kind']} of the next job", occupy(each["kind"], each))
    for each in OCCUPIED
)
COMMANDS = tuple(
    Attempt("ConfigMap", "admin", f"kdist {line} after: {change.__name__}", verb(line, change))
    for line in VERBS
    for change in (intrude, escalate, nest)
)
TABLE = (
    *STORED_JOB,
    *NEW_PODS,
    Attempt("ConfigMap", ALICE, "stored limits that no one can read", nodes_json),
    Attempt("ConfigMap", ALICE, "another owner of the ConfigMap", claim_ownership),
    Attempt("ConfigMap", ALICE, "a ConfigMap of hers in its place", replace_config_map),
    Attempt("labels", ALICE, "a finished Job with the job's labels", foreign_job),
    Attempt("labels", ALICE, "a suspended Job with the job's labels", suspended_job),
    Attempt("labels", ALICE, "a failed pod with the job's labels", failed_pod),
    *NAMES,
    Attempt("network", EVE, "every port of the job's pods", reach_ports),
    Attempt("network", EVE, "pods of all namespaces", refuse(EVE, "get", "pods", "-A")),
    Attempt("network", EVE, "kube-system", refuse(EVE, "get", "--raw", f"{CORE}/pods")),
    Attempt("view", VERA, "deletes a ConfigMap", refuse(VERA, "delete", "configmap", "digits")),
    Attempt("view", VERA, "forwards a port", refuse(VERA, "port-forward", "job/digits", ":9401")),
    Attempt("view", VERA, "runs a command", refuse(VERA, "exec", "job/digits", "--", "true")),
    Attempt("view", VERA, "reads Secrets", refuse(VERA, "get", "secrets")),
    Attempt("view", VERA, "posts to a pod's port", post_by_proxy),
    *COMMANDS,
)
